-- Who held an attempt last: `worker` is the one that claimed it, `adopter` the last one that adopted it, NULL if nobody did.

ALTER TABLE jobs ADD COLUMN adopter TEXT;
ALTER TABLE attempts ADD COLUMN adopter TEXT;
