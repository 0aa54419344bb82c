-- What each move of a job writes: the one place for both dialects. Which moves there are is in model/lifecycle.py (`MOVES`), and
-- what follows from a stop request or a cause too: {stop_status}, {is_over} and their like are made from those tables
-- (move_rules.py).
--
-- `j` is the job as it was, `t.now_at` the time of the statement, which the statement has to provide on Postgres. The statement
-- also says which jobs, and writes the event. A column that a move does not name keeps its value.

-- fragment: changed_at
-- Times of a job never go back.
greatest(t.now_at, j.updated_at)

-- fragment: claim_writes
-- queued → running: a new attempt with a new token, in the domain p. Where attempts die with their worker (:function) it starts
-- with the claim.
status = 'running',
gate = NULL,
owner = :worker::text,
token = j.token + 1,
lease_expires_at = t.now_at + make_interval(secs => :ttl::float8),
last_beat_at = t.now_at,
queue_deadline_at = NULL,
adoptions = 0,
attempt = j.attempt + 1,
phase = CASE WHEN p.domain = :function::text THEN 'started' ELSE 'claimed' END,
worker = :worker::text,
adopter = NULL,
domain = p.domain,
claimed_at = {changed_at},
claim_seq = j.seq + 1,
attempt_started_at = CASE WHEN p.domain = :function::text THEN {changed_at} END,
stdout_offset = 0,
stderr_offset = 0,
batch = 0,
started_at = coalesce(j.started_at, {changed_at}),
updated_at = {changed_at},
seq = j.seq + 1

-- fragment: adopt_writes
-- running → running: an orphan gets a new owner. Its attempt goes on.
owner = :worker::text,
token = j.token + 1,
lease_expires_at = t.now_at + make_interval(secs => :ttl::float8),
last_beat_at = t.now_at,
orphaned_at = NULL,
adopt_after_at = NULL,
adoptions = j.adoptions + 1,
adopter = :worker::text,
updated_at = {changed_at},
seq = j.seq + 1

-- fragment: release_writes
-- running → running: the lease ends and the attempt goes on, as an orphan.
owner = NULL,
token = j.token + 1,
lease_expires_at = NULL,
orphaned_at = {changed_at},
updated_at = {changed_at},
seq = j.seq + 1

-- fragment: hand_over_writes
-- By its worker. Only adoptions that failed are counted.
{release_writes},
adopt_after_at = t.now_at + make_interval(secs => :delay::float8),
adoptions = CASE WHEN :adoption_failed::boolean THEN j.adoptions ELSE 0 END

-- fragment: reap_writes
-- Without its worker, which is gone. An orphan whose adoptions brought no progress waits longer each time.
{release_writes},
adopt_after_at = t.now_at + make_interval(secs => CASE
  WHEN j.adoptions = 0 THEN 0
  ELSE least(:cap::float8, :base::float8 * (1 << (least(j.adoptions, 30) - 1)))
END)

-- fragment: start_writes
-- The attempt now runs: progress, so earlier adoptions no longer count.
phase = 'started',
attempt_started_at = coalesce(j.attempt_started_at, {changed_at}),
adoptions = 0,
updated_at = {changed_at}

-- fragment: beat_writes
-- If an adopter has held a silent job for ten minutes, the job did not kill it: its adoptions no longer count.
lease_expires_at = t.now_at + make_interval(secs => :ttl::float8),
last_beat_at = t.now_at,
adoptions = CASE WHEN t.now_at < j.updated_at + make_interval(secs => 600) THEN j.adoptions ELSE 0 END

-- fragment: request_stop_writes
stop_kind = :kind::text,
stop_reason = :reason::text,
stop_phase = coalesce(j.stop_phase, 'requested'),
updated_at = {changed_at},
seq = j.seq + json_array_length(:events::json)

-- fragment: advance_stop_writes
stop_phase = :phase::text,
stop_deadline_at = coalesce(t.now_at + make_interval(secs => :grace::float8), j.stop_deadline_at),
updated_at = {changed_at},
seq = j.seq + 1

-- fragment: finish_writes
-- running → what the end i asks for: a terminal status, paused, or queued again. A requeue looks at the stop request: the job ends
-- as that asks ({stopped_instead}). The token stays, so that a repeat after a lost reply finds its own end.
status = CASE WHEN {stopped_instead} THEN {stop_status} ELSE i.status END,
gate = CASE WHEN {is_queued_again} THEN CASE WHEN i.delay > 0 THEN 'future' ELSE 'open' END END,
available_at = CASE WHEN {is_queued_again} THEN {changed_at} + make_interval(secs => i.delay) ELSE j.available_at END,
finished_at = CASE WHEN {is_over} THEN {changed_at} END,
updated_at = {changed_at},
owner = NULL,
lease_expires_at = NULL,
orphaned_at = NULL,
phase = NULL,
spent = j.spent + CASE WHEN {is_counted} THEN 1 ELSE 0 END,
unsettled = j.unsettled OR (j.has_dependants AND ({is_over})),
exit_code = i.exit_code,
error_code = CASE WHEN {stopped_instead} THEN {stop_code} ELSE i.error_code END,
error_message = CASE WHEN {stopped_instead} THEN {stop_message} ELSE i.error_message END || CASE
  WHEN j.stop_reason IS NOT NULL AND ({stopped_instead} OR i.error_code IN ({stop_codes})) THEN ': ' || j.stop_reason
  ELSE ''
END,
result = i.result::json,
seq = j.seq + 1

-- fragment: move_writes
-- Any status → :status, by a person or a duty, without a lease. An orphan that leaves `running` gets a new token; one that returns
-- to `running` can be adopted at once.
status = :status::text,
gate = :gate::text,
held = j.held AND :status::text IN ('pending', 'failed'),
finished_at = CASE
  WHEN :status::text NOT IN ({terminal}) THEN NULL
  WHEN j.status = :status::text THEN j.finished_at
  ELSE {changed_at}
END,
updated_at = {changed_at},
token = j.token + CASE WHEN j.status = 'running' THEN 1 ELSE 0 END,
orphaned_at = CASE WHEN :status::text = 'running' THEN {changed_at} END,
adopt_after_at = CASE WHEN :status::text = 'running' THEN t.now_at END,
phase = CASE WHEN :close_attempt::boolean THEN NULL ELSE j.phase END,
spent = j.spent + CASE WHEN :close_attempt::boolean AND j.phase IS NOT NULL THEN 1 ELSE 0 END,
dismissed = :dismissed::boolean,
max_attempts = greatest(j.max_attempts, coalesce(:max_attempts::integer, 0)),
queue_deadline_at = CASE WHEN :status::text = 'queued'
  THEN greatest(t.now_at, j.available_at) + make_interval(secs => :queue_timeout::float8) END,
stop_kind = :stop_kind::text,
stop_phase = CASE WHEN :stop_kind::text IS NOT NULL THEN coalesce(j.stop_phase, 'requested') END,
stop_deadline_at = CASE WHEN :stop_kind::text IS NOT NULL THEN j.stop_deadline_at END,
stop_reason = CASE WHEN :stop_kind::text IS NOT NULL THEN j.stop_reason END,
unsettled = j.unsettled OR (j.has_dependants AND :unsettle::boolean),
adoptions = CASE WHEN :status::text = 'queued' THEN 0 ELSE j.adoptions END,
error_code = CASE WHEN :keep_error::boolean THEN j.error_code ELSE :error_code::text END,
error_message = CASE WHEN :keep_error::boolean THEN j.error_message ELSE :error_message::text END,
result = CASE WHEN :dismissed::boolean THEN j.result ELSE :result::json END,
seq = j.seq + json_array_length(:events::json)

-- fragment: fail_writes
-- pending, queued → failed: a job that it needs (r) cannot succeed.
status = 'failed',
gate = NULL,
finished_at = {changed_at},
updated_at = {changed_at},
queue_deadline_at = NULL,
unsettled = j.unsettled OR j.has_dependants,
error_code = 'dependency_failed',
error_message = r.message,
seq = j.seq + 1

-- fragment: revive_writes
-- failed → queued, or pending if it was held: nothing that it needs blocks it any more.
status = CASE WHEN j.held THEN 'pending' ELSE 'queued' END,
gate = 'unresolved',
dismissed = false,
finished_at = NULL,
updated_at = {changed_at},
queue_deadline_at = CASE WHEN NOT j.held
  THEN greatest(t.now_at, j.available_at) + make_interval(secs => (s.policy ->> 'queue_timeout')::float8) END,
error_code = NULL,
error_message = NULL,
unsettled = j.unsettled OR j.has_dependants,
seq = j.seq + 1

-- fragment: revivable
-- A job that failed only because of needs that no longer block it.
j.status = 'failed'
  AND j.error_code = 'dependency_failed'
  AND j.stop_kind IS NULL
  AND NOT EXISTS (
    SELECT 1 FROM holdfast.needs AS n
    LEFT JOIN holdfast.jobs AS p ON p.id = n.need_id
    WHERE n.job_id = j.id
      AND NOT n.satisfied
      AND (p.id IS NULL OR p.status IN ({broken})))
