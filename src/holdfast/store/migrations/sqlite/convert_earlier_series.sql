-- As on Postgres. Differs: SQLite adds no column that must have a value, so the two tables are made again.
DROP TABLE migrations;
CREATE TABLE migrations (
  number INTEGER PRIMARY KEY,
  name TEXT NOT NULL,
  applied_at INTEGER NOT NULL,
  checksum TEXT NOT NULL,
  oldest INTEGER NOT NULL
);
DROP TABLE repeatables;
CREATE TABLE repeatables (
  file TEXT NOT NULL CONSTRAINT repeatables_pkey PRIMARY KEY,
  revision INTEGER NOT NULL,
  checksum TEXT NOT NULL,
  applied_at INTEGER NOT NULL,
  oldest INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
