-- oldest: 1
-- The same rule without a regular expression, which took more than 1 of the 12 µs of a job in a bulk submit.
ALTER TABLE holdfast.specs
  DROP CONSTRAINT runner_named,
  ADD CONSTRAINT runner_named CHECK (
    length(runner) <= 63
    AND ascii(runner) BETWEEN ascii('a') AND ascii('z')
    AND translate(runner, 'abcdefghijklmnopqrstuvwxyz0123456789_-', '') = '');
