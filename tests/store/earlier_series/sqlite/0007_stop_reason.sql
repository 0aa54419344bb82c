-- Why somebody asked a running job to stop, as in the Postgres migration of the same number.

ALTER TABLE jobs ADD COLUMN stop_reason TEXT;
