-- When a token was last used; servers note it a few times a minute.

ALTER TABLE holdfast.tokens ADD COLUMN used_at timestamptz;
