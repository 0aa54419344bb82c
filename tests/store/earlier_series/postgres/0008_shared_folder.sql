-- The id of the shared folder that belongs to this database, and the path by which the part that recorded it knew it.
-- Null until the first part starts that uses one.

ALTER TABLE holdfast.installation ADD COLUMN shared_folder text, ADD COLUMN shared_path text;
