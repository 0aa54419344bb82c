-- Tokens: who may call the service. Looked up by the hash of the secret; the secret itself is not stored.

-- name: find_token
-- A token that has not expired. Uses tokens_hash.
SELECT t.id, t.name, t.role, t.tenant, t.created_at, t.created_by, t.expires_at, t.used_at
FROM tokens AS t
WHERE t.hash = :hash
  AND (t.expires_at IS NULL OR t.expires_at > clock());

-- name: list_tokens
SELECT t.id, t.name, t.role, t.tenant, t.created_at, t.created_by, t.expires_at, t.used_at
FROM tokens AS t
ORDER BY t.name;

-- name: add_token
-- No row: the name is taken.
INSERT INTO tokens (id, name, role, tenant, hash, created_at, created_by, expires_at)
VALUES (:id, :name, :role, :tenant, :hash, clock(), :created_by, :until_at)
ON CONFLICT DO NOTHING
RETURNING id, name, role, tenant, created_at, created_by, expires_at, used_at;

-- name: permanent_admins
-- Admin tokens that never expire: one of them must remain. The write lock is held already.
SELECT t.id
FROM tokens AS t
WHERE t.role = 'admin'
  AND t.expires_at IS NULL
ORDER BY t.id;

-- name: remove_token
DELETE FROM tokens
WHERE id = :id
RETURNING id, name, role, tenant, created_at, created_by, expires_at, used_at;

-- name: lock_tokens
-- Which of these tokens exist, and whether each was unused for :silence seconds. The write lock is held already.
SELECT t.id, t.name, t.role, t.tenant, t.created_at, t.created_by, t.expires_at, t.used_at,
  t.used_at IS NULL OR t.used_at <= clock() - CAST(:silence * 1000000 AS INTEGER) AS silent
FROM tokens AS t
WHERE t.id IN (SELECT value FROM json_each(:ids))
ORDER BY t.id;

-- name: use_tokens
-- Record that these tokens were used.
UPDATE tokens SET used_at = clock() WHERE id IN (SELECT value FROM json_each(:ids));
