-- Outputs of snapshots, as in the Postgres migration of the same number.

ALTER TABLE snapshots ADD COLUMN outputs TEXT;
