"""Ids of jobs: UUIDv7, which grow within this process."""

import os
import threading
import time


class _IdSource:
    """Makes UUIDv7 ids that grow within this process, even within one millisecond."""

    POOL = 4096

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._random = b""
        # A forked child must not reuse its parent's random bytes.
        os.register_at_fork(after_in_child=self.__init__)  # type: ignore[misc]

    def next(self) -> str:
        with self._lock:
            self._last = head = max(self._last + 1, (time.time_ns() // 1_000_000) << 12)
            if not self._random:
                self._random = os.urandom(self.POOL)
            tail, self._random = self._random[:8], self._random[8:]
        return _uuid7(head, tail)


def _uuid7(head: int, tail: bytes) -> str:
    text = f"{head >> 12:012x}"
    rest = tail.hex()
    return f"{text[:8]}-{text[8:]}-7{head & 0xFFF:03x}-{_VARIANT[tail[0] & 3]}{rest[1:4]}-{rest[4:]}"


_VARIANT = "89ab"

new_id = _IdSource().next
