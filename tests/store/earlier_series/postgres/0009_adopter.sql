-- Who held an attempt last: `worker` is the one that claimed it, `adopter` the last one that adopted it, NULL if nobody did.

ALTER TABLE holdfast.jobs ADD COLUMN adopter text COLLATE "C";
ALTER TABLE holdfast.attempts ADD COLUMN adopter text COLLATE "C";
