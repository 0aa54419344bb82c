-- Temporary tables that pass rows between the statements of one script. Created once per writing connection.
-- They have no key, so that the planner reads them first and looks the jobs up.
-- Differs: Postgres does the same with data-modifying CTEs.
CREATE TEMP TABLE lines (queue TEXT, capability TEXT, domain TEXT, tenant TEXT, lap INTEGER);
CREATE TEMP TABLE picked (id TEXT, place INTEGER);
CREATE TEMP TABLE told (id TEXT, token INTEGER, owner TEXT);
CREATE TEMP TABLE ended (
  place INTEGER, stop_kind TEXT, stop_reason TEXT, status TEXT, cause TEXT, exit_code INTEGER, signal INTEGER, error_code TEXT,
  error_message TEXT, result TEXT, delay REAL);
