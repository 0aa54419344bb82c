-- The audit trail: a row is added in the transaction of the change that it reports, and removed by age.

-- name: add_audit
INSERT INTO holdfast.audit (done_at, actor, token_id, role, address, tenant, action, subject, before, after, reason)
VALUES (holdfast.clock(), :actor::text, :token_id::uuid, :role::text, :address::text, :tenant::text, :action::text,
  :subject::text, :before::json, :after::json, :reason::text);

-- name: list_audit
-- One page, newest first. Filters are applied while scanning the list. Uses audit_listed.
SELECT a.id, a.done_at, a.actor, a.token_id, a.role, a.address, a.tenant, a.action, a.subject, a.before, a.after, a.reason
FROM holdfast.audit AS a
WHERE (a.done_at, a.id) < (coalesce(:before_at::timestamptz, 'infinity'), coalesce(:before_id::bigint, 0))
  AND a.done_at >= coalesce(:since_at::timestamptz, '-infinity')
  AND (:who::text IS NULL OR a.actor = :who::text OR a.token_id::text = :who::text)
  AND (:what::text IS NULL OR a.action = :what::text OR substr(a.action, 1, length(:what::text) + 1) = :what::text || '.')
ORDER BY a.done_at DESC, a.id DESC
LIMIT :limit::integer;

-- name: last_of_action
-- The newest row of an action. Uses audit_listed.
SELECT a.after
FROM holdfast.audit AS a
WHERE a.action = :action::text
ORDER BY a.done_at DESC, a.id DESC
LIMIT 1;

-- name: lock_tools
-- One server at a time compares its tools with those loaded last.
SELECT 1 AS locked
FROM holdfast.installation AS i
FOR UPDATE;

-- name: prune_audit
-- The oldest rows that are older than :age seconds, except the one that says which tools were loaded last: the next
-- server compares its own with it. Uses audit_listed.
DELETE FROM holdfast.audit AS a
WHERE a.id IN (
  SELECT o.id
  FROM holdfast.audit AS o
  WHERE o.done_at <= holdfast.clock() - make_interval(secs => :age::float8)
    AND (o.action <> 'tools.change' OR EXISTS (
      SELECT 1
      FROM holdfast.audit AS n
      WHERE n.action = 'tools.change'
        AND (n.done_at, n.id) > (o.done_at, o.id)))
  ORDER BY o.done_at, o.id
  LIMIT :limit::integer)
RETURNING a.id;
