-- As in the Postgres migration of the same number.
CREATE TABLE repeatables (
  file TEXT NOT NULL CONSTRAINT repeatables_pkey PRIMARY KEY,
  revision INTEGER NOT NULL,
  checksum TEXT NOT NULL,
  applied_at INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
