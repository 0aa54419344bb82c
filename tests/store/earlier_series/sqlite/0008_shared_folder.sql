-- The id of the shared folder that belongs to this database, and the path by which the part that recorded it knew it.
-- Null until the first part starts that uses one.

ALTER TABLE installation ADD COLUMN shared_folder TEXT;
ALTER TABLE installation ADD COLUMN shared_path TEXT;
