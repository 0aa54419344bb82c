"""Many workers on one database: order, caps, fairness, and hosts that cannot be reached for a while."""

import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast.errors import Conflict
from holdfast.model import Cause, Job, Status
from holdfast.runner.supervisor.protocol import ExitCause
from holdfast.worker.held_leases import boottime
from tests.support.crashing_worker import Hook
from tests.support.in_process_workers import PATIENCE
from tests.support.worker_processes import WorkerProcesses, alive

STOP_AFTER = 8.0
"""Seconds; ten heartbeats, so that a machine with other things to do does not use them up."""
STARTS_AND_ENDS = 'echo "start $NAME" >> "$MARKER"; sleep 0.1; echo "end $NAME" >> "$MARKER"'


async def noted(processes: WorkerProcesses, marker: str, name: str, **fields: Any) -> Job:
    """Submit a process that notes its start and its end in a file that others note theirs in too."""
    return await processes.sh(STARTS_AND_ENDS, env={"MARKER": processes.marker(marker), "NAME": name}, **fields)


async def all_ended(processes: WorkerProcesses, jobs: list[Job]) -> None:
    for job in jobs:
        await processes.ended(job, Status.SUCCEEDED)


async def test_a_lane_runs_one_job_at_a_time_in_order_on_any_number_of_workers(processes: WorkerProcesses) -> None:
    """Proves N1."""
    jobs = [await noted(processes, f"lane {n % 5}", str(n // 5), lane=f"lane {n % 5}") for n in range(60)]
    for _ in range(3):
        processes.start({"default": 4})
    await all_ended(processes, jobs)
    for lane in range(5):
        assert processes.marker_lines(f"lane {lane}") == [f"{what} {n}" for n in range(12) for what in ("start", "end")]


async def test_workers_together_stay_below_a_queues_cap(processes: WorkerProcesses) -> None:
    """Proves J10. Nobody fails for want of room."""
    await processes.store.queues.limit("capped", cap=2)
    jobs = [await noted(processes, "capped", str(n), queue="capped") for n in range(16)]
    for _ in range(3):
        processes.start({"capped": 4})
    await all_ended(processes, jobs)
    running, most = 0, 0
    for line in processes.marker_lines("capped"):
        running += 1 if line.startswith("start") else -1
        most = max(most, running)
    assert (running, most) == (0, 2)


async def test_delayed_job_starts_when_it_is_due(processes: WorkerProcesses) -> None:
    """Proves J7. The worker polls less often than this test waits, so it does not wait for a poll."""
    soon = datetime.now(UTC) + timedelta(seconds=4)
    first = await processes.chatty("first", available_at=soon)
    processes.start({"default": 2}, poll_interval=2 * PATIENCE)
    await processes.eventually(processes.locks, "the worker is there")
    second = await processes.chatty("second", available_at=soon + timedelta(seconds=1))
    for job in (first, second):
        started = (await processes.ended(job, Status.SUCCEEDED)).started_at
        assert started is not None
        assert started >= job.available_at


async def test_tenants_take_turns(processes: WorkerProcesses) -> None:
    """Proves N5. A backlog of one tenant does not delay another's first job by more than a round."""
    for n in range(30):
        await processes.store.jobs.submit(_named_nap(processes, f"a{n}"), tenant="a")
    last = [await processes.store.jobs.submit(_named_nap(processes, f"b{n}"), tenant="b") for n in range(2)]
    processes.start({"default": 2})
    await processes.wait_for_marker("turns", 64)
    started = [line.split()[0] for line in processes.marker_lines("turns") if " start " in line]
    assert started.index("b0") < 4
    assert started.index("b1") < 6
    for job in last:
        assert (await processes.store.jobs.get(job.id, tenant="b")).attempts == 1


def _named_nap(processes: WorkerProcesses, name: str) -> dict[str, object]:
    inputs = {"path": processes.marker("turns"), "seconds": 0.02, "name": name}
    return {"runner": "function", "spec": {"name": "nap"}, "inputs": inputs}


async def test_attempts_of_a_host_that_was_cut_off_continue(processes: WorkerProcesses) -> None:
    """Proves R6, N2, L6. Nobody knows whether the attempts run: they wait for a person, and nothing overlaps.

    One host's worker sleeps, another's is dead and nobody replaces it, until both come back and adopt what is theirs.
    """
    grace: dict[str, Any] = {"orphan_grace": 1.0}
    jobs = {host: await processes.chatty(host, gated=True, queue=host, lane=host) for host in ("asleep", "dead")}
    later = {host: await processes.chatty(f"later {host}", lane=host) for host in jobs}
    asleep = processes.start({"asleep": 1}, Hook(step="shipped", do="stop"), host="asleep", **grace)
    dead = processes.start({"dead": 1}, Hook(step="shipped", do="kill"), host="dead", **grace)
    await asleep.stopped()
    await dead.dead()
    processes.start({"default": 4}, host="elsewhere", **grace)
    for host, job in jobs.items():
        paused = await processes.ended(job, Status.PAUSED)
        assert paused.error is not None
        assert paused.error.code == "lost"
        assert alive(processes.marker_lines(host)[0])
        with pytest.raises(Conflict):
            await processes.store.jobs.resume(job.id)
        assert (await processes.get(later[host])).started_at is None
    asleep.signal(signal.SIGCONT)
    processes.start({"other": 1}, host="dead", **grace)
    for host, job in jobs.items():
        await processes.leaves(job, Status.PAUSED)
        processes.open_gate(host)
        await processes.assert_whole(host, job)
        assert await processes.statuses(job) == ["queued", "running", "paused", "running", "succeeded"]
        await processes.assert_whole(f"later {host}", later[host])


async def test_stop_after_ends_the_child_before_the_next_attempt_starts_elsewhere(processes: WorkerProcesses) -> None:
    """Proves R21, R6: beats renew it span after span; with no worker the child is gone before the next attempt starts.

    A host that comes back later only clears up.
    """
    script = (
        'if [ "$HOLDFAST_ATTEMPT" = 2 ]; then while read -r pid; do [ ! -d "/proc/$pid" ] || exit 1; done < "$MARKER"; '
        'exit 0; fi; echo $$ >> "$MARKER"; setsid sleep 1000 & echo $! >> "$MARKER"; wait'
    )
    job = await processes.sh(
        script, env={"MARKER": processes.marker("job")}, max_attempts=2, stop_after=STOP_AFTER, stop_grace=0.5,
        retry={"base": 0.1, "cap": 0.1, "on": []},
    )  # fmt: skip
    worker = processes.start({"default": 1}, host="a", heartbeat_interval=STOP_AFTER / 10)
    await processes.wait_for_marker("job", 2)
    since = boottime()
    held = await processes.running(job)
    assert held.lease is not None
    token = held.lease.token
    folder = processes.folder_of(job)

    def outlived() -> bool:
        """Whether three spans have passed; a child that was not renewed is stopped after the first."""
        assert folder.exit() is None, f"stopped after {boottime() - since:.1f} s, while its worker lived"
        return boottime() > since + 3 * STOP_AFTER

    await processes.eventually(outlived, "beats keep it for three times its stop_after")
    assert all(alive(pid) for pid in processes.marker_lines("job"))
    worker.kill()
    processes.start({"default": 1}, host="b", orphan_grace=0.5)
    stopped = await processes.eventually(folder.exit, "its supervisor stops it")
    await processes.ended(job, Status.SUCCEEDED)
    assert (stopped.cause, stopped.stopped_by) == (ExitCause.STOP_AFTER, "limit")
    assert not any(alive(pid) for pid in processes.marker_lines("job"))
    first, second = await processes.store.attempts.list(job.id)
    assert (first.cause, first.token > token) == (Cause.LOST, True)
    assert first.domain != second.domain
    spec = folder.path / "spec"
    assert spec.exists()
    processes.start({"other": 1}, host="a")
    await processes.eventually(lambda: not spec.exists(), "its leftovers are swept, but for the mark")
    await processes.assert_true(job)
