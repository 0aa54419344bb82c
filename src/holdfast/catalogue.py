"""The meaning of each event type, error code of a job, and audit action.

The reference in `docs/` is made from these, and a test finds names that the code uses and that are missing here.
"""

from collections.abc import Mapping

EVENTS: Mapping[str, str] = {
    "status": "The status changed: `status`; `attempt`, `worker`, `cause`, `code`, `message`, `by` as they apply.",
    "log": "Lines of output: `stream` (`stdout` or `stderr`), `lines`; `capped` where the log was cut.",
    "progress": "Progress that the job reports: `percent`, `message`, and fields of its own.",
    "usage": "Usage that the job reports, as deltas by name; summed over attempts.",
    "lease": "The lease of the attempt changed: `lease` is `adopted`, `reaped` or `handed_over`; `worker`, `token`. A "
    "hand-over has a `reason`: `leaving`, `engine_unreachable`, `failed`, `unanswered_claim`, or `dead`.",
    "cancel": "How far a stop has come: `cancel` is `requested`, `signalled`, `killed`, `dead` or `not_dead`; `kind`.",
    "audit": "A person or program changed the job: `action`, `by`, `reason`.",
    "task": "A task of a pipeline changed (`status`, `cached`, `exit_code`), or all were planned (`plan`, `tasks`).",
    "artifacts": "Files that are not kept as artifacts: `skipped`, with `path` and `reason`; `more` counts the rest.",
    "result": "Reserved for results of tasks.",
    "error": "Reserved for errors of tasks.",
}
FREE = frozenset({"progress", "usage"})
"""Types that a job may write itself, besides its own."""

CODES: Mapping[str, str] = {
    "cancelled": "The job was cancelled.",
    "interrupted": "The job was interrupted: it is paused and can be resumed.",
    "timed_out": "An attempt took longer than `timeout`.",
    "idle_timeout": "The attempt wrote no output for longer than `idle_timeout`.",
    "queue_timeout": "No worker claimed the job within `queue_timeout`.",
    "exit_nonzero": "The command exited with a code other than 0, or was ended by a signal.",
    "reported_failure": "The command exited with 0, but its `result.json` reports a failure.",
    "start_failed": "The attempt could not be started: the message says why.",
    "disk_full": "The disk was full when the attempt was to start. Nothing ran, the attempt does not count, and the "
    "job waits in its queue.",
    "command_missing": "The command does not exist or cannot be executed. Never retried.",
    "root_refused": "The job would run as root, and `HOLDFAST_ALLOW_ROOT_JOBS` is not set. Never retried.",
    "image_missing": "The engine does not have the image. Never retried.",
    "out_of_memory": "The attempt exceeded its memory limit: it was killed, or an allocation failed and it ended. See "
    "`spec.memory`.",
    "folder_too_large": "The work folder, output and log grew beyond `spec.folder_size`. Never retried.",
    "file_too_large": "The attempt wrote a file larger than `spec.file_size`. Never retried.",
    "too_many_processes": "The attempt started more processes and threads than `spec.pids`.",
    "contract_violation": "The inputs do not fit, or the outputs break the contract. Never retried.",
    "outputs_not_stored": "The attempt succeeded, but the shared folder had no space for its output for "
    "`HOLDFAST_OUTPUTS_TIMEOUT`. Never retried: the work was done. Make room, then resume the job to run it again.",
    "budget_exceeded": "The job used more than its `budget`. Never retried; a resume must raise the budget.",
    "function_error": "The function raised: type and text of the exception; the traceback is in the worker's log.",
    "not_ready": "A readiness check of the job or its lane did not succeed in time: the job is paused.",
    "cache_full": "No space for a snapshot, and none that could be evicted. See `HOLDFAST_SNAPSHOTS_MAX_BYTES`.",
    "not_quiet": "The workspace changed while it was copied, or its server was not shut down cleanly.",
    "service_ended": "The server beside the tasks of a pipeline ended by itself: its log says why.",
    "snapshot_damaged": "A snapshot that the job starts from is gone, or differs from what was published.",
    "snapshot_failed": "A snapshot could not be read or made on the worker's host: the message says why.",
    "dependency_failed": "A dependency failed or was cancelled: the message names it.",
    "lost": "The attempt was lost with its worker, host or engine; or that is not certain, and the job is paused.",
    "internal": "holdfast itself failed with the job: the worker's log says why.",
}

ACTIONS: Mapping[str, str] = {
    "token.make": "A token was made: `name`, `role`, `expires_at`. The server itself makes the first.",
    "token.remove": "A token was deleted.",
    "token.use": "A token was used for the first time, or after 30 days without a use: from `address`.",
    "auth.refused": "Requests with unknown tokens: how many `requests`, from how many `addresses`, the `most` active "
    "ones. One row per server and minute at most.",
    "tools.change": "A server started with other tools than the last one: `added`, `changed`, `removed`.",
    "queue.pause": "A queue was paused.",
    "queue.resume": "A queue was resumed.",
    "queue.limit": "The limits of a queue were changed: `max_running`, `max_depth`.",
    "lane.pause": "A lane was paused.",
    "lane.resume": "A lane was resumed.",
    "lane.check": "The readiness check of a lane was set or removed: the program, not its arguments.",
    "job.resolve": "A person marked a job as succeeded. Its result is not in the trail.",
    "job.dismiss": "A failed job was dismissed, so that its lane continues.",
    "job.resume": "A job was resumed with a raised `budget`, or with the statement that its attempt has `stopped`.",
    "job.delete": "A job was deleted; with `force`, it was stopped first.",
    "jobs.prune": "`holdfast prune` was run: ended jobs past their retention period were removed.",
    "snapshot.remove": "A snapshot was removed, with those made from it: `removed` counts them.",
    "worker.drain": "Workers were asked to drain.",
    "worker.lost": "A host or domain was reported gone: what ran there was settled as lost.",
    "shared_folder.adopt": "`holdfast shared-folder adopt` made another folder the shared one.",
}
"""What the audit trail records, by action."""
