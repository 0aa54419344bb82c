"""A full disk at a start: which errors mean that, and the pause in which a runner starts nothing after one."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.errors import CacheFull
from holdfast.runner.attempt_folder import FULL
from holdfast.runner.base import NoSpace
from holdfast.timing import backoff

BASE_SECONDS, CAP_SECONDS = 2.0, 60.0
"""The first pause, and the longest one while starts keep failing."""


@contextmanager
def needs_space(what: str) -> Iterator[None]:
    """Map a full disk to NoSpace; `what` names the step, as in "cannot make the attempt's folder"."""
    try:
        yield
    except CacheFull as error:
        raise NoSpace(f"{what}: {error}") from error
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise NoSpace(f"{what}: {error.strerror}") from error


class StartPause:
    """No starts for a while after one found the disk full; longer each time that happens again right after a pause."""

    def __init__(self) -> None:
        self._why = ""
        self._rounds = 0
        self._until = float("-inf")

    def begin(self, why: str) -> None:
        """Begin a pause, unless there is one: starts that fail together count once."""
        now = time.monotonic()
        if now < self._until:
            return
        self._rounds = self._rounds + 1 if now < self._until + CAP_SECONDS else 1
        self._until = now + backoff(self._rounds, base=BASE_SECONDS, cap=CAP_SECONDS)
        self._why = why

    @property
    def left(self) -> float:
        """Seconds until the end of the pause; 0 if there is none."""
        return max(0.0, self._until - time.monotonic())

    @property
    def why(self) -> str | None:
        """What to tell people while it lasts."""
        return self._why if self.left > 0 else None
