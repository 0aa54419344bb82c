-- The audit trail: a row is added in the transaction of the change that it reports, and removed by age.

-- name: add_audit
INSERT INTO audit (done_at, actor, token_id, role, address, tenant, action, subject, before, after, reason)
VALUES (clock(), :actor, :token_id, :role, :address, :tenant, :action, :subject, :before, :after, :reason);

-- name: list_audit
-- One page, newest first. Filters are applied while scanning the list. Uses audit_listed.
SELECT a.id, a.done_at, a.actor, a.token_id, a.role, a.address, a.tenant, a.action, a.subject, a.before, a.after, a.reason
FROM audit AS a
WHERE (a.done_at, a.id) < (coalesce(:before_at, 9223372036854775807), coalesce(:before_id, 0))
  AND a.done_at >= coalesce(:since_at, -9223372036854775807)
  AND (:who IS NULL OR a.actor = :who OR a.token_id = :who)
  AND (:what IS NULL OR a.action = :what OR substr(a.action, 1, length(:what) + 1) = :what || '.')
ORDER BY a.done_at DESC, a.id DESC
LIMIT :limit;

-- name: last_of_action
-- The newest row of an action. Uses audit_listed.
SELECT a.after
FROM audit AS a
WHERE a.action = :action
ORDER BY a.done_at DESC, a.id DESC
LIMIT 1;

-- name: lock_tools
-- One server at a time compares its tools with those loaded last. Differs: the write lock is held already.
SELECT 1 AS locked;

-- name: prune_audit
-- The oldest rows that are older than :age seconds, except the one that says which tools were loaded last: the next
-- server compares its own with it. Uses audit_listed.
DELETE FROM audit
WHERE id IN (
  SELECT o.id
  FROM audit AS o
  WHERE o.done_at <= clock() - CAST(:age * 1000000 AS INTEGER)
    AND (o.action <> 'tools.change' OR EXISTS (
      SELECT 1
      FROM audit AS n
      WHERE n.action = 'tools.change'
        AND (n.done_at, n.id) > (o.done_at, o.id)))
  ORDER BY o.done_at, o.id
  LIMIT :limit)
RETURNING id;
