-- A reuse key remembers the build that succeeded while an older, failed one is resumed: `succeeded_id` is returned until `job_id`
-- succeeds itself. It is NULL unless a resume took the key from a job that had succeeded.

ALTER TABLE reuse ADD COLUMN succeeded_id TEXT;
