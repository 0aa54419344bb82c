"""`SyncHoldfast`: the calls of an application for synchronous code. They block."""

import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from holdfast.client.app import Holdfast
from holdfast.client.loop_thread import LoopThread
from holdfast.client.options import Files
from holdfast.client.sync_submits import SyncSubmits
from holdfast.model import Job as JobRecord


class SyncHoldfast(SyncSubmits):
    """An open application, for synchronous code: `app.sync()` makes one.

        with app.sync() as jobs:
            print(jobs.submit(send, to="a@b.c").result(timeout=60))

    It has a connection and an event loop in a thread of its own, and may be used from several threads.
    """

    def __init__(self, app: Holdfast) -> None:
        self._app = app.closed_copy()
        thread = LoopThread("holdfast-app")
        super().__init__(thread, self._app)
        try:
            thread.do(self._app.__aenter__())
        except BaseException:
            thread.shut_down()
            raise
        # Also runs when the program ends, or the last reference is dropped, without a call of `close`.
        self._shut_down = weakref.finalize(self, thread.shut_down, self._app.close)

    def jobs(self, **filters: Any) -> tuple[Sequence[JobRecord], str | None]:
        """Return one page of jobs, newest first, and the cursor of the next. Filters as for `Holdfast.jobs`."""
        return self._do(self._app.jobs(**filters))

    def upload(self, files: Files) -> str:
        """Store files that a job can name in `uploads` within a day; return the upload's id."""
        return self._do(self._app.upload(files))

    def close(self) -> None:
        """End all calls and close the connections. Idempotent."""
        self._shut_down()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
