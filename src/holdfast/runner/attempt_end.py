"""Maps the exit record of a supervisor to the end of its attempt: one pure function, for all runners."""

from holdfast.model import Cause, Error
from holdfast.runner.attempt_folder import ExitRecord
from holdfast.runner.base import AttemptEnd
from holdfast.runner.supervisor.protocol import ExitCause

LAST_OUTPUT = 500
"""Characters of a service's last output in the error that reports its end."""
MISSING = ("No such file or directory", "Permission denied", "Exec format error", "Not a directory", "Is a directory")


def to_end(ended: ExitRecord, service: bytes = b"") -> AttemptEnd:
    """Map an exit record to an AttemptEnd. `service` is the last output of a service that ended by itself."""
    match ended.cause:
        case ExitCause.STOP_AFTER:
            message = "the supervisor stopped the attempt: no heartbeat reached it within stop_after"
            return AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message=message))
        case ExitCause.INTERRUPTED if ended.stopped_by == "signal":
            message = "its supervisor was stopped by a signal from outside holdfast"
            return AttemptEnd(cause=Cause.LOST, error=Error(code="lost", message=message))
        case ExitCause.START_FAILED:
            missing = "could not run it: " in ended.text and ended.text.rpartition(": ")[2] in MISSING
            code = "command_missing" if missing else "start_failed"
            return AttemptEnd(cause=Cause.START_FAILED, error=Error(code=code, message=ended.text))
        case ExitCause.SERVICE_ENDED:
            last = service.decode("utf-8", "replace").strip()[-LAST_OUTPUT:]
            message = f"{ended.text}; its last output: {last}" if last else ended.text
            return AttemptEnd(cause=Cause.EXIT, error=Error(code="service_ended", message=message))
        case ExitCause.FAILED:
            code, _, message = ended.text.partition(": ")
            return AttemptEnd(cause=Cause.EXIT, error=Error(code=code, message=message))
    kept = (ended.stdout_length - ended.stdout_dropped, ended.stderr_length - ended.stderr_dropped)
    return AttemptEnd(cause=Cause(ended.cause), exit_code=ended.code, signal=ended.signal, output_bytes=kept)
