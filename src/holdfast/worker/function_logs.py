"""What a function logs with Python's `logging` goes to its job's log.

One handler on the root logger serves all functions of this process; a context variable says whose record it is, also in
tasks that the function starts. Levels and filters are the program's own. Records of holdfast itself are left out.
"""

import logging
import traceback
from collections.abc import Callable
from contextvars import ContextVar

from holdfast.model import NewEvent

Emit = Callable[[NewEvent], None]


class logs_to:  # noqa: N801
    """Sends what is logged inside the block to a job's log. A class, as every call of a function enters it."""

    __slots__ = ("_before", "emit")

    def __init__(self, emit: Emit) -> None:
        self.emit: Emit | None = emit

    def __enter__(self) -> None:
        self._before = _sink.set(self)

    def __exit__(self, *_: object) -> None:
        self.emit = None
        _sink.reset(self._before)


_sink: ContextVar[logs_to | None] = ContextVar("holdfast_function_logs", default=None)


class FunctionLogHandler(logging.Handler):
    """Sends a record to the job whose function made it."""

    def emit(self, record: logging.LogRecord) -> None:
        sink = _sink.get()
        if sink is not None and sink.emit is not None and record.name.partition(".")[0] != "holdfast":
            lines = [line.encode("utf-8", "replace").decode() for line in _lines(record)]
            sink.emit(NewEvent(type="log", data={"stream": "stderr", "lines": lines}))
        if self._alone(record) and logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)

    def _alone(self, record: logging.LogRecord) -> bool:
        """Whether no other handler gets the record: then Python prints a warning, as if this one did not exist."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return False
            logger = logger.parent if logger.propagate else None
        return True


def _lines(record: logging.LogRecord) -> list[str]:
    try:
        text = f"{record.levelname} {record.name}: {record.getMessage()}"
    except Exception as error:  # The arguments of a record may not fit its message.
        text = f"{record.levelname} {record.name}: {record.msg} ({type(error).__name__}: {error})"
    if record.exc_info and record.exc_info[0] is not None:
        text += "\n" + "".join(traceback.format_exception(*record.exc_info))
    return text.splitlines() or [""]


_handler = FunctionLogHandler()
_users = 0


def install() -> None:
    """Add the handler to the root logger, once for all workers of this process."""
    global _users  # noqa: PLW0603
    _users += 1
    if _users == 1:
        logging.getLogger().addHandler(_handler)


def uninstall() -> None:
    """Remove the handler with the last worker."""
    global _users  # noqa: PLW0603
    _users -= 1
    if _users == 0:
        logging.getLogger().removeHandler(_handler)
