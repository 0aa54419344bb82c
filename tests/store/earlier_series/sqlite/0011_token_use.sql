-- When a token was last used, as in the Postgres migration of the same number.

ALTER TABLE tokens ADD COLUMN used_at INTEGER;
