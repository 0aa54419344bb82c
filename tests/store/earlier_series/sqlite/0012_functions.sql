-- As in the Postgres migration of the same number. Differs: what accepts a batch fills the defaults in.
CREATE TABLE functions (
  function TEXT NOT NULL PRIMARY KEY,
  revision INTEGER NOT NULL,
  defaults TEXT NOT NULL,
  updated_at INTEGER NOT NULL
) WITHOUT ROWID, STRICT;
