-- Temporary tables through which a script of several statements hands rows on. Made once per writing connection.
-- They have no key, so that the planner reads them first and looks the jobs up.
-- Differs: Postgres does the same with data-modifying CTEs.
CREATE TEMP TABLE submitted (
  id TEXT, tenant TEXT, kind TEXT, queue TEXT, lane TEXT, priority INTEGER, labels TEXT, runner TEXT, spec TEXT,
  inputs TEXT, needs TEXT, hold INTEGER, available_at INTEGER, max_attempts INTEGER, policy TEXT);
CREATE TEMP TABLE lines (queue TEXT, capability TEXT, domain TEXT, tenant TEXT);
CREATE TEMP TABLE picked (id TEXT, place INTEGER);
CREATE TEMP TABLE told (id TEXT, token INTEGER);
CREATE TEMP TABLE ended (
  place INTEGER, id TEXT, token INTEGER, attempt INTEGER, seq INTEGER, worker TEXT, domain TEXT, claimed_at INTEGER,
  attempt_started_at INTEGER, counts INTEGER, status TEXT, error_code TEXT, error_message TEXT, cause TEXT,
  exit_code INTEGER, signal INTEGER, result TEXT, now_at INTEGER, delay REAL);
