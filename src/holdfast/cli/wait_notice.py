"""Why `holdfast run` waits: said after two seconds, and again when the reason changes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from holdfast.cli.terminal import say
from holdfast.client.http import Refused, ServerUnreachable
from holdfast.model import WAITING, Event, Status

if TYPE_CHECKING:
    from holdfast.client.http import AsyncClient

FIRST_SECONDS, MOST_SECONDS, GROWTH = 2.0, 30.0, 1.5
READY = "the job is ready; the next worker with a free slot claims it"


class WaitNotice:
    """Says why a job waits, for as long as it does."""

    def __init__(self, client: "AsyncClient", job_id: str) -> None:
        self._client = client
        self._job_id = job_id
        self._waits = True
        self._last = ""

    def hear(self, event: Event) -> None:
        """Take note of whether the job waits."""
        if event.type == "status":
            self._waits = Status(event.data["status"]) in WAITING

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        # A bare task, not a task group: an error of the block is raised as it is, for its exit code.
        task = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _watch(self) -> None:
        pause = FIRST_SECONDS
        while True:
            await asyncio.sleep(pause)
            if self._waits:
                await self._say_why()
            pause = min(pause * GROWTH, MOST_SECONDS)

    async def _say_why(self) -> None:
        try:
            why = await self._client.explain(self._job_id)
        except (Refused, ServerUnreachable):
            return  # The stream of events reports an outage.
        text = "; ".join(reason.message for reason in why.reasons) or READY
        if why.status in WAITING and self._waits and text != self._last:
            self._last = text
            say(f"holdfast: waiting: {text}", err=True)
