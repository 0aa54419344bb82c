-- A database that has all migrations of the earlier series has the tables of 0001_schema.sql; only its records differ.
DELETE FROM holdfast.migrations;
ALTER TABLE holdfast.migrations ADD COLUMN checksum text NOT NULL, ADD COLUMN oldest integer NOT NULL;
DELETE FROM holdfast.repeatables;
ALTER TABLE holdfast.repeatables ADD COLUMN oldest integer NOT NULL;
