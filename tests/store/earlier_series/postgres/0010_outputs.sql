-- What the tasks of a pipeline left up to a snapshot: the manifest of their files, which are stored beside the snapshot's folder,
-- and what result.json said. NULL for snapshots made by versions before this one.

ALTER TABLE holdfast.snapshots ADD COLUMN outputs json;
