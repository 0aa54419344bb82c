-- Which jobs begin with a snapshot: it is not to go while one of them waits, long before its tasks have rows. Only jobs that
-- have a base are in this index; it is found in their spec, so that nothing more is written at a submit.

CREATE INDEX specs_base ON specs (tenant, spec ->> '$.base') WHERE spec ->> '$.base' IS NOT NULL;
