"""The words that the record uses, each with what it means: types of events, and codes of errors that jobs end with.

The reference in `docs/` is made from these, and a test looks for words that the code uses and nobody explains here.
"""

from collections.abc import Mapping

EVENTS: Mapping[str, str] = {
    "status": "The job moved: `status`; `attempt`, `worker`, `cause`, `code`, `message`, `by` as they apply.",
    "log": "Lines of output: `stream` (`stdout` or `stderr`), `lines`; `capped` where the log was cut.",
    "progress": "What the job says of itself: `percent`, `message`, and more of its own.",
    "usage": "What it used, as deltas by name; summed over attempts.",
    "lease": "The attempt changed hands: `lease` is `adopted`, `reaped` or `handed_over`; `worker`, `token`. A "
    "hand-over has a `reason`: `leaving`, `engine_unreachable`, `failed`, `unanswered_claim`, or `dead`.",
    "cancel": "How far a stop has come: `cancel` is `requested`, `signalled`, `killed`, `dead` or `not_dead`; `kind`.",
    "audit": "What somebody did: `action`, `by`, `reason`.",
    "task": "A task of a pipeline moved (`status`, `cached`, `exit_code`), or all were planned (`plan`, `tasks`).",
    "artifacts": "What was left out of the artifacts: `skipped`, with `path` and `reason`; `more` counts the rest.",
    "result": "Kept for results of tasks.",
    "error": "Kept for errors of tasks.",
}
FREE = frozenset({"progress", "usage"})
"""What a job may say itself, besides names of its own."""

CODES: Mapping[str, str] = {
    "cancelled": "Somebody cancelled it.",
    "interrupted": "Somebody interrupted it: it is paused and can be resumed.",
    "timed_out": "An attempt took longer than `timeout`.",
    "idle_timeout": "It said nothing for longer than `idle_timeout`.",
    "queue_timeout": "No worker took it within `queue_timeout`.",
    "exit_nonzero": "The command ended with another code than 0, or by a signal.",
    "reported_failure": "It ended with 0, but its `result.json` says that it failed.",
    "start_failed": "It could not be started: the message says why.",
    "command_missing": "No such command, or not to be run. Never retried.",
    "image_missing": "The engine does not have the image. Never retried.",
    "out_of_memory": "Killed for using more memory than it may.",
    "contract_violation": "Inputs that do not fit, or outputs that break the contract. Never retried.",
    "budget_exceeded": "It used more than its `budget`. Never retried; a resume must raise the budget.",
    "function_error": "The function raised: type and text; the traceback is in the worker's log.",
    "not_ready": "A readiness check, its own or its lane's, did not succeed in time: it is paused.",
    "cache_full": "There was no room for a snapshot, and nothing that may go. See `HOLDFAST_SNAPSHOTS_MAX_BYTES`.",
    "not_quiet": "The workspace changed while it was copied, or its server was not shut down cleanly.",
    "service_ended": "The server beside the tasks of a pipeline ended by itself: its log says why.",
    "snapshot_damaged": "A snapshot that it begins with is gone, or not what was published.",
    "snapshot_failed": "A snapshot could not be read on the worker's host, or not be made: the message says why.",
    "dependency_failed": "A job that it needs failed or was cancelled: the message names it.",
    "lost": "The attempt is gone with its worker, host or engine; or it is feared so, and the job is paused.",
    "internal": "holdfast could not go on with it: the worker's log says why.",
}
