-- Tokens: who may call the service. Looked up by the hash of the secret; the secret itself is not stored.

-- fragment: token_columns
t.id, t.name, t.role, t.tenant, t.created_at, t.created_by, t.expires_at, t.used_at

-- name: find_token
-- A token that has not expired. Uses tokens_hash.
SELECT {token_columns}
FROM holdfast.tokens AS t
WHERE t.hash = :hash::text
  AND (t.expires_at IS NULL OR t.expires_at > holdfast.clock());

-- name: list_tokens
SELECT {token_columns}
FROM holdfast.tokens AS t
ORDER BY t.name;

-- name: add_token
-- No row: the name is taken.
INSERT INTO holdfast.tokens (id, name, role, tenant, hash, created_at, created_by, expires_at)
VALUES (:id::uuid, :name::text, :role::text, :tenant::text, :hash::text, holdfast.clock(), :created_by::text,
  :until_at::timestamptz)
ON CONFLICT DO NOTHING
RETURNING id, name, role, tenant, created_at, created_by, expires_at, used_at;

-- name: permanent_admins
-- Admin tokens that never expire, locked in order: one of them must remain.
SELECT t.id
FROM holdfast.tokens AS t
WHERE t.role = 'admin'
  AND t.expires_at IS NULL
ORDER BY t.id
FOR UPDATE;

-- name: remove_token
DELETE FROM holdfast.tokens AS t
WHERE t.id = :id::uuid
RETURNING {token_columns};

-- name: lock_tokens
-- Which of these tokens exist, locked in order, and whether each was unused for :silence seconds.
SELECT {token_columns},
  t.used_at IS NULL OR t.used_at <= holdfast.clock() - make_interval(secs => :silence::float8) AS silent
FROM holdfast.tokens AS t
WHERE t.id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e)
ORDER BY t.id
FOR NO KEY UPDATE;

-- name: use_tokens
-- Record that these tokens were used.
UPDATE holdfast.tokens SET used_at = holdfast.clock()
WHERE id IN (SELECT e::uuid FROM json_array_elements_text(:ids::json) AS e);
