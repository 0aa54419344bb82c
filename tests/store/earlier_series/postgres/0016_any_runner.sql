-- The registry of runners decides which runners exist, also installed ones. The database only checks how a runner is written,
-- because a capability is the name of a runner, or that name and what follows a colon.
ALTER TABLE holdfast.specs
  DROP CONSTRAINT runner_known,
  ADD CONSTRAINT runner_named CHECK (runner ~ '^[a-z][a-z0-9_-]{0,62}$');
