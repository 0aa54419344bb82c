"""Runs functions inside this worker: on its event loop or in a thread. They are stopped through their cancel token.

A small job costs one task and its share of two batched statements. Logs, progress and usage are appended while the
function runs, a few times a second, and only if there are any.
"""

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from holdfast.errors import HoldfastError
from holdfast.model import Cause, Outcome, Status
from holdfast.runner.base import AttemptEnd
from holdfast.runner.function import FunctionRegistry, RegisteredFunction
from holdfast.worker import function_logs
from holdfast.worker.classify import classify, stop_cause
from holdfast.worker.execution_services import ExecutionServices
from holdfast.worker.function_call import FunctionCall
from holdfast.worker.held_leases import HeldLease
from holdfast.worker.stop_sequence import StopReason

log = logging.getLogger(__name__)

LAST_SECONDS = 0.5


class FunctionExecutor:
    """All function calls in progress in this worker."""

    def __init__(
        self,
        services: ExecutionServices,
        functions: FunctionRegistry,
        *,
        threads: int,
        done: Callable[[HeldLease], None],
    ) -> None:
        self.services = services
        self._functions = functions
        self.threads = ThreadPoolExecutor(threads, thread_name_prefix="holdfast-function")
        self._done = done
        self._calls: set[FunctionCall] = set()
        self._empty = asyncio.Event()
        self.thread = threading.get_ident()
        self.loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._captures_logs = False
        self.stuck_threads = 0
        """Threads that still run a function which was given up."""

    def launch(self, held: HeldLease) -> None:
        """Start a function job that was just claimed, unless its lease was lost since.

        A fault fails this job only: the worker launches the jobs that were claimed with it next.
        """
        try:
            self.services.at("launching", held.lease)
            self._start(held)
        except Exception as error:
            log.exception("job %s: internal error while launching the function; failing the job", held.lease.id)
            self.finish(held, Outcome.failed("internal", f"the worker could not launch it: {error}"))

    def _start(self, held: HeldLease) -> None:
        if held.lost:
            self._done(held)
            return
        if not self._captures_logs:
            self._captures_logs = True
            function_logs.install()
        call = FunctionCall(self, held)
        self._calls.add(call)
        # Reason for a bare task: a function that ignores its cancellation must not keep the worker from exiting.
        call.task = self.loop.create_task(call.run())
        self._tasks.add(call.task)
        call.task.add_done_callback(self._tasks.discard)
        if held.stop is not None:  # It came between the claim and now.
            call.changed()

    def settle_orphan(self, held: HeldLease) -> None:
        """Finish an orphaned function job: the function died with its worker."""
        stop = held.lease.adoption.stop_request
        end = AttemptEnd(cause=Cause.LOST if stop is None else stop_cause(stop))
        self.finish(held, classify(end, held.lease))

    def find(self, name: str) -> RegisteredFunction | None:
        return self._functions.get(name)

    def finish(self, held: HeldLease, outcome: Outcome, call: FunctionCall | None = None) -> None:
        """Submit an outcome to be written. The lease is dropped when it is recorded or found to be lost."""

        def answer(found: Status | Exception | None) -> None:
            if isinstance(found, Exception):
                message = str(found) if isinstance(found, HoldfastError) else "the outcome could not be written"
                log.error("job %s: its outcome cannot be written, failing the job instead: %s", held.lease.id, found)
                self.finish(held, Outcome.failed("function_error", message), call)
                return
            self.services.at("finished", held.lease)
            self._forget(call)
            self._done(held)

        held.finishing = True
        self.services.finishes.put((held.lease, outcome), answer)

    def drop(self, call: FunctionCall) -> None:
        """Forget a run whose lease is lost."""
        self._forget(call)
        self._done(call.held)

    def _forget(self, call: FunctionCall | None) -> None:
        if call is not None:
            call.held.on_change = None  # Else the two refer to each other, and only a garbage collection frees them.
            self._calls.discard(call)
            if not self._calls:
                self._empty.set()

    async def drain(self, grace: float) -> None:
        """Wait up to `grace` for functions to end; then requeue the jobs of the others as `drained`."""
        for call in list(self._calls):
            call.stop(StopReason.DRAIN)
        if self._calls:
            self._empty.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await self._empty.wait()
        for call in list(self._calls):
            call.give_up()
        if self._calls:
            await self._empty.wait()

    @property
    def stuck(self) -> bool:
        """Whether a function that was given up still runs: it would keep the process from exiting."""
        return self.stuck_threads > 0 or bool(self._tasks)

    async def close(self) -> None:
        """Shut the thread pool down, after a last moment for cancelled functions to end."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_SECONDS)
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self._captures_logs:
            self._captures_logs = False
            function_logs.uninstall()
