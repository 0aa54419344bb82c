-- The audit trail: who changed what belongs to operators, and when. Rows are added, and removed by age; never changed.

CREATE TABLE holdfast.audit (
  id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  done_at timestamptz NOT NULL,
  actor text NOT NULL,
  token_id uuid,
  role text,
  address text,
  tenant text,
  action text NOT NULL,
  subject text NOT NULL,
  before json,
  after json,
  reason text
);

CREATE INDEX audit_listed ON holdfast.audit (done_at, id);
