"""What a runner guarantees, as tests. A script is for a POSIX shell.

Each test makes its own attempts and cleans up after itself.
"""

import asyncio
import os
import pickle
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from holdfast.config import Settings
from holdfast.errors import Invalid
from holdfast.model import Cause
from holdfast.registry import runner_named
from holdfast.runner.base import AttemptEnd, AttemptHandle, Identity, Runner, StartRequest, StartTooLate
from holdfast.runner.collected_outputs import ArtifactLimits, CollectedOutputs
from holdfast.runner.folder_writer import FolderWriter
from holdfast.runner.frames import Stream
from holdfast.runner.state_folder import StateFolder
from holdfast.runner.wire import Command
from holdfast.runner_specs import check_spec
from holdfast.testing import killed_worker
from holdfast.testing.killed_worker import lease_confirmed

PATIENCE = 60.0
INSTALLATION = "0123456789abcdef0123456789abcdef"
"""Runners of this suite work for this installation."""


async def until(condition: Callable[[], bool], what: str) -> None:
    """Wait until a condition becomes true; fail after a while."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"never came true: {what}"
        await asyncio.sleep(0.01)


class Watched:
    """An attempt, and its output so far."""

    def __init__(self, running: AttemptHandle) -> None:
        self.running = running
        self.output = {Stream.STDOUT: b"", Stream.STDERR: b""}
        self.events: list[dict[str, Any]] = []
        running.watch(lambda: None)

    async def read(self) -> None:
        while frames := await self.running.frames(1 << 16):
            for frame in frames:
                if frame.stream is Stream.EVENTS:
                    self.events.append(frame.event)
                else:
                    self.output[frame.stream] += frame.data

    async def says(self, text: bytes) -> None:
        deadline = time.monotonic() + PATIENCE
        while text not in self.output[Stream.STDOUT]:
            assert time.monotonic() < deadline, f"it never said {text!r}: {self.output}"
            await self.read()
            await asyncio.sleep(0.01)

    async def end(self) -> AttemptEnd:
        """Wait for its end, read the rest, and collect it."""
        await until(lambda: self.running.over, "it ends")
        await self.read()
        deadline = time.monotonic() + PATIENCE
        while (end := await self.running.collect()) is None:
            assert time.monotonic() < deadline, "what is left of it cannot be killed"
            await asyncio.sleep(0.05)
        return end


class RunnerSuite:
    """What a runner guarantees. Set `name` and define `spec`; override `settings` if the runner needs any."""

    name: str

    def spec(self, script: str) -> Mapping[str, Any]:
        """Return the spec of a job that runs a shell script."""
        raise NotImplementedError

    @pytest.fixture
    def settings(self, tmp_path: Path) -> Settings:
        """The settings of the worker. As root, attempts run as root: other users cannot reach pytest's folders."""
        return Settings(data_dir=tmp_path / "data", process_user="root" if os.geteuid() == 0 else None)

    @pytest.fixture
    async def runner(self, settings: Settings) -> AsyncIterator[Runner]:
        """The runner, built as a worker builds it."""
        async with AsyncExitStack() as stack:
            yield await killed_worker.built(self.name, settings, INSTALLATION, stack)

    @pytest.fixture
    def adoptable(self) -> None:
        """Skip tests of attempts that outlive their worker, if the descriptor says that this runner's do not."""
        if not runner_named(self.name).adoptable:
            pytest.skip(f"attempts of runner {self.name} die with their worker")

    def order(self, runner: Runner, script: str, **more: Any) -> StartRequest:
        identity = more.pop("identity", None) or Identity(INSTALLATION, str(uuid.uuid4()), 1)
        start_by = more.pop("start_by", time.clock_gettime(time.CLOCK_BOOTTIME) + 60)
        fields = {"token": 1, "inputs": {"n": 1}, "stop_grace": 1.0, **more}
        return StartRequest(
            identity=identity, domain=runner.domain, spec=self.spec(script), start_by=start_by, **fields
        )

    async def started(self, runner: Runner, script: str, **more: Any) -> tuple[StartRequest, Watched]:
        order = self.order(runner, script, **more)
        return order, Watched(await runner.start(order, lease_confirmed))

    async def found(self, runner: Runner, order: StartRequest, **offsets: int) -> tuple[str, AttemptHandle]:
        given = {"stdout": 0, "stderr": 0, **offsets}
        return await runner.find(order.identity, order.domain, **given)

    async def test_the_descriptor_fits_the_runner(self, runner: Runner, settings: Settings) -> None:
        """Its own domains are what keeps workers without this runner from adopting its attempts."""
        assert runner.capability == self.name
        assert runner.domain in runner.domains
        if self.name != "process":
            assert not set(runner.domains) & set(StateFolder(settings.state).domains)
        spec = self.spec("true")
        check_spec(self.name, spec)
        with pytest.raises(Invalid):
            check_spec(self.name, {**spec, "no-such-field": 1})

    async def test_output_and_exit_code(self, runner: Runner) -> None:
        """Both streams apart, whole to the last byte. Proves R10, R20."""
        _, attempt = await self.started(runner, "echo out; echo err >&2; printf end; exit 3")
        end = await attempt.end()
        assert (end.cause, end.exit_code) == (Cause.EXIT, 3)
        assert attempt.output[Stream.STDOUT] == b"out\nend"
        assert attempt.output[Stream.STDERR] == b"err\n"
        await attempt.running.remove(had_other_owners=False)

    async def test_identity_and_inputs(self, runner: Runner) -> None:
        """Proves R1."""
        order, attempt = await self.started(
            runner,
            'echo $HOLDFAST_JOB_ID $HOLDFAST_ATTEMPT $HOLDFAST_LEASE_TOKEN; cat "$HOLDFAST_WORK_DIR/request.json"',
        )
        await attempt.end()
        assert attempt.output[Stream.STDOUT] == f'{order.identity.job} 1 1\n{{"n":1}}'.encode()
        await attempt.running.remove(had_other_owners=False)

    @pytest.mark.usefixtures("adoptable")
    async def test_what_runs_is_found_and_read_on(self, runner: Runner) -> None:
        """An adopter continues at the recorded offsets, without gap or repeat. Proves R3."""
        order, attempt = await self.started(runner, "echo one; sleep 1; echo two")
        await attempt.says(b"one\n")
        attempt.running.close()
        state, running = await self.found(runner, order, stdout=4)
        assert state == "running"
        adopter = Watched(running)
        assert (await adopter.end()).exit_code == 0
        assert adopter.output[Stream.STDOUT] == b"two\n"
        await running.remove(had_other_owners=True)

    @pytest.mark.usefixtures("adoptable")
    async def test_what_a_killed_worker_started_is_found_and_stopped(
        self, runner: Runner, settings: Settings, tmp_path: Path
    ) -> None:
        """The next owner's token counts from then on. Proves R3, L6."""
        order = self.order(runner, "echo up; while :; do sleep 1; done")
        await self.start_and_kill(order, settings, tmp_path / "request")
        state, running = await self.found(runner, order)
        assert state == "running"
        adopter = Watched(running)
        await adopter.says(b"up\n")
        await running.send(Command(token=order.token + 1, verb="hold"))
        await running.send(Command(token=order.token + 1, verb="stop", kind="cancel", grace=0.3))
        assert (await adopter.end()).cause is Cause.CANCELLED
        await running.remove(had_other_owners=True)

    async def start_and_kill(self, order: StartRequest, settings: Settings, file: Path) -> None:
        """Start an attempt in another process, and kill that process."""
        file.write_bytes(pickle.dumps((self.name, settings, order)))  # noqa: ASYNC240 - a small file
        pipe = asyncio.subprocess.PIPE
        worker = await asyncio.create_subprocess_exec(
            sys.executable, "-m", killed_worker.__name__, str(file), stdin=pipe, stdout=pipe
        )
        assert worker.stdout is not None
        assert await worker.stdout.readline() == killed_worker.STARTED
        worker.kill()
        await worker.wait()

    @pytest.mark.usefixtures("adoptable")
    async def test_what_ended_unwatched_is_found(self, runner: Runner) -> None:
        """Proves R2."""
        order, attempt = await self.started(runner, "echo done; exit 4")
        await until(lambda: attempt.running.over, "it ends")
        attempt.running.close()
        state, running = await self.found(runner, order)
        assert state == "exited"
        adopter = Watched(running)
        assert (await adopter.end()).exit_code == 4
        assert adopter.output[Stream.STDOUT] == b"done\n"
        await running.remove(had_other_owners=False)

    async def test_nothing_is_missing(self, runner: Runner) -> None:
        order = self.order(runner, "true")
        state, running = await self.found(runner, order)
        running.close()
        assert state == "missing"

    async def test_an_attempt_starts_once(self, runner: Runner) -> None:
        """A second start finds the attempt that runs. Proves L13."""
        order, attempt = await self.started(runner, "echo ran; sleep 1")
        await attempt.says(b"ran\n")
        again = Watched(await runner.start(order, lease_confirmed))
        await again.end()
        await attempt.end()
        assert again.output[Stream.STDOUT] == attempt.output[Stream.STDOUT] == b"ran\n"
        again.running.close()
        await attempt.running.remove(had_other_owners=False)

    async def test_a_start_that_comes_too_late_starts_nothing(self, runner: Runner) -> None:
        """Proves L15."""
        order = self.order(runner, "echo ran", start_by=time.clock_gettime(time.CLOCK_BOOTTIME) - 1)
        try:
            running = await runner.start(order, lease_confirmed)
        except StartTooLate:
            pass
        else:
            raise AssertionError(f"it started: {running}")
        await self.cleared(runner, order)

    async def test_what_is_forbidden_never_starts(self, runner: Runner) -> None:
        order = self.order(runner, "true")
        assert await runner.forbid(order.identity, order.domain)
        state, running = await self.found(runner, order)
        running.close()
        assert state in ("missing", "forbidden")
        await self.cleared(runner, order)

    async def test_a_stop_ends_it_by_its_reason(self, runner: Runner) -> None:
        """Even if it ignores the polite signal. Proves C4."""
        order, attempt = await self.started(runner, "trap '' TERM; echo up; while :; do sleep 1; done")
        await attempt.says(b"up\n")
        await attempt.running.send(Command(token=order.token, verb="stop", kind="interrupt", grace=0.3))
        assert (await attempt.end()).cause is Cause.INTERRUPTED
        await attempt.running.remove(had_other_owners=False)

    async def test_a_former_owners_word_counts_no_more(self, runner: Runner) -> None:
        """Proves L6."""
        order, attempt = await self.started(runner, "echo up; sleep 1.5; echo end")
        await attempt.says(b"up\n")
        await attempt.running.send(Command(token=order.token + 1, verb="hold"))
        await attempt.running.send(Command(token=order.token, verb="stop", kind="cancel", grace=0.1))
        assert (await attempt.end()).exit_code == 0
        assert attempt.output[Stream.STDOUT] == b"up\nend\n"
        await attempt.running.remove(had_other_owners=False)

    async def test_limits_of_time_hold_by_themselves(self, runner: Runner) -> None:
        """Proves R8, R9."""
        ends = {}
        for name, limits in (("timeout", {"timeout": 0.5}), ("idle", {"idle_timeout": 0.5})):
            _, attempt = await self.started(runner, "sleep 60", stop_grace=0.2, **limits)
            ends[name] = (await attempt.end()).cause
            await attempt.running.remove(had_other_owners=False)
        assert ends == {"timeout": Cause.TIMED_OUT, "idle": Cause.IDLE_TIMEOUT}

    async def test_outputs(self, runner: Runner, tmp_path: Path) -> None:
        """Proves R13, R14."""
        _, attempt = await self.started(
            runner, 'cd "$HOLDFAST_WORK_DIR" && mkdir -p output/a && echo x > output/a/b && echo {} > result.json'
        )
        await attempt.end()
        gathered = CollectedOutputs(FolderWriter(tmp_path / "kept"), ArtifactLimits(bytes=1000))
        await attempt.running.outputs(gathered)
        gathered.publish()
        assert gathered.report == b"{}\n"
        assert (tmp_path / "kept" / "a" / "b").read_bytes() == b"x\n"
        await attempt.running.remove(had_other_owners=False)

    async def test_what_is_left_over_is_listed_and_swept(self, runner: Runner) -> None:
        """Proves R12, R16."""
        order, attempt = await self.started(runner, "true")
        await attempt.end()
        attempt.running.close()
        assert order.identity in await runner.remaining_attempts()
        await runner.sweep(order.identity)
        state, running = await self.found(runner, order)
        running.close()
        assert state in ("missing", "exited", "died", "forbidden")

    async def test_a_sweep_stops_what_still_runs(self, runner: Runner) -> None:
        """Its job has moved on, so no one else will. Proves R12."""
        order, attempt = await self.started(runner, "echo up; while :; do sleep 1; done")
        await attempt.says(b"up\n")
        attempt.running.close()
        deadline = time.monotonic() + PATIENCE
        while not await runner.sweep(order.identity):
            assert time.monotonic() < deadline, "the sweep cannot stop it"
            await asyncio.sleep(0.05)
        state, running = await self.found(runner, order)
        running.close()
        assert state != "running"

    async def cleared(self, runner: Runner, order: StartRequest) -> None:
        """Remove all traces of an attempt that never ran."""
        await runner.sweep(order.identity)
