-- The audit trail: who changed what belongs to operators, and when. Rows are added, and removed by age; never changed.

CREATE TABLE audit (
  id INTEGER PRIMARY KEY,
  done_at INTEGER NOT NULL,
  actor TEXT NOT NULL,
  token_id TEXT,
  role TEXT,
  address TEXT,
  tenant TEXT,
  action TEXT NOT NULL,
  subject TEXT NOT NULL,
  before TEXT,
  after TEXT,
  reason TEXT
);

CREATE INDEX audit_listed ON audit (done_at, id);
