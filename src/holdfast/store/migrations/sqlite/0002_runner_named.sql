-- oldest: 1
-- Only Postgres has a slow rule here (its migration of this number). SQLite compares with GLOB.
SELECT 1;
