-- Temporary tables that pass rows between the statements of one script. Created once per writing connection.
-- They have no key, so that the planner reads them first and looks the jobs up.
-- Differs: Postgres does the same with data-modifying CTEs.
CREATE TEMP TABLE lines (tenant_n INTEGER, tenant TEXT, queue TEXT, capability TEXT, domain TEXT, share INTEGER);
CREATE TEMP TABLE picked (id TEXT, job_rowid INTEGER, domain TEXT);
CREATE TEMP TABLE affected (id TEXT, token INTEGER, owner TEXT);
CREATE TEMP TABLE broken (id TEXT, need_id TEXT, message TEXT);
CREATE TEMP TABLE ended (
  job_rowid INTEGER, status TEXT, cause TEXT, exit_code INTEGER, signal INTEGER, error_code TEXT, error_message TEXT, result TEXT,
  delay REAL);
