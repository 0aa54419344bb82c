-- Which files of views, functions and triggers this database has: `holdfast migrate` applies them again when they change.
CREATE TABLE holdfast.repeatables (
  file text COLLATE "C" CONSTRAINT repeatables_pkey PRIMARY KEY,
  revision integer NOT NULL,
  checksum text NOT NULL,
  applied_at timestamptz NOT NULL
);
COMMENT ON COLUMN holdfast.repeatables.revision IS 'A holdfast that knows a lower one does not overwrite the file.';
