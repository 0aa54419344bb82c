"""Many workers on one database: order, caps and turns between them, and hosts that cannot be reached for a while."""

import signal
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from holdfast.errors import Conflict
from holdfast.model import Cause, Job, Status
from holdfast.runner.supervisor.protocol import ExitCause
from holdfast.worker.held_leases import boottime
from tests.support.crashing_worker import Hook
from tests.support.worker_processes import Fleet, alive

STOP_AFTER = 5.0
"""Seconds; ten heartbeats, so that a machine with other things to do does not use them up."""
STARTS_AND_ENDS = 'echo "start $NAME" >> "$MARKER"; sleep 0.1; echo "end $NAME" >> "$MARKER"'


async def noted(fleet: Fleet, marker: str, name: str, **fields: Any) -> Job:
    """Submit a process that notes its start and its end in a file that others note theirs in too."""
    return await fleet.sh(STARTS_AND_ENDS, env={"MARKER": fleet.marker(marker), "NAME": name}, **fields)


async def all_ended(fleet: Fleet, jobs: list[Job]) -> None:
    for job in jobs:
        await fleet.ended(job, Status.SUCCEEDED)


async def test_a_lane_runs_one_job_at_a_time_in_order_on_any_number_of_workers(fleet: Fleet) -> None:
    """Proves N1."""
    jobs = [await noted(fleet, f"lane {n % 5}", str(n // 5), lane=f"lane {n % 5}") for n in range(60)]
    for _ in range(3):
        fleet.start({"default": 4})
    await all_ended(fleet, jobs)
    for lane in range(5):
        assert fleet.marks(f"lane {lane}") == [f"{what} {n}" for n in range(12) for what in ("start", "end")]


async def test_workers_together_stay_below_a_queues_cap(fleet: Fleet) -> None:
    """Proves J10. Nobody fails for want of room."""
    await fleet.store.queues.limit("capped", cap=2)
    jobs = [await noted(fleet, "capped", str(n), queue="capped") for n in range(16)]
    for _ in range(3):
        fleet.start({"capped": 4})
    await all_ended(fleet, jobs)
    running, most = 0, 0
    for line in fleet.marks("capped"):
        running += 1 if line.startswith("start") else -1
        most = max(most, running)
    assert (running, most) == (0, 2)


async def test_delayed_job_starts_when_it_is_due(fleet: Fleet) -> None:
    """Proves J7. The worker polls twice a minute, and does not wait for that, also while it rests."""
    soon = datetime.now(UTC) + timedelta(seconds=4)
    first = await fleet.chatty("first", available_at=soon)
    fleet.start({"default": 2}, poll_interval=30.0)
    await fleet.eventually(fleet.locks, "the worker is there")
    second = await fleet.chatty("second", available_at=soon + timedelta(seconds=1))
    for job in (first, second):
        started = (await fleet.ended(job, Status.SUCCEEDED)).started_at
        assert started is not None
        assert timedelta(0) <= started - job.available_at < timedelta(seconds=15)


async def test_tenants_take_turns(fleet: Fleet) -> None:
    """Proves N5. A backlog of one tenant does not delay another's first job by more than a round."""
    for n in range(30):
        await fleet.store.jobs.submit(_named_nap(fleet, f"a{n}"), tenant="a")
    last = [await fleet.store.jobs.submit(_named_nap(fleet, f"b{n}"), tenant="b") for n in range(2)]
    fleet.start({"default": 2})
    await fleet.marked("turns", 64)
    started = [line.split()[0] for line in fleet.marks("turns") if " start " in line]
    assert started.index("b0") < 4
    assert started.index("b1") < 6
    for job in last:
        assert (await fleet.store.jobs.get(job.id, tenant="b")).attempts == 1


def _named_nap(fleet: Fleet, name: str) -> dict[str, object]:
    inputs = {"path": fleet.marker("turns"), "seconds": 0.02, "name": name}
    return {"runner": "function", "spec": {"name": "nap"}, "inputs": inputs}


async def test_host_that_was_cut_off_goes_on_where_it_was(fleet: Fleet) -> None:
    """Proves R6, N2, L6. Nobody knows whether the attempts run: they wait for a person, and nothing overlaps.

    One host's worker sleeps, another's is dead and nobody replaces it, until both come back and adopt what is theirs.
    """
    grace: dict[str, Any] = {"orphan_grace": 1.0}
    jobs = {host: await fleet.chatty(host, gated=True, queue=host, lane=host) for host in ("asleep", "dead")}
    behind = {host: await fleet.chatty(f"behind {host}", lane=host) for host in jobs}
    asleep = fleet.start({"asleep": 1}, Hook(step="shipped", do="stop"), host="asleep", **grace)
    dead = fleet.start({"dead": 1}, Hook(step="shipped", do="kill"), host="dead", **grace)
    await asleep.stopped()
    await dead.dead()
    fleet.start({"default": 4}, host="elsewhere", **grace)
    for host, job in jobs.items():
        paused = await fleet.ended(job, Status.PAUSED)
        assert paused.error is not None
        assert paused.error.code == "lost"
        assert alive(fleet.marks(host)[0])
        with pytest.raises(Conflict):
            await fleet.store.jobs.resume(job.id)
        assert (await fleet.get(behind[host])).started_at is None
    asleep.signal(signal.SIGCONT)
    fleet.start({"other": 1}, host="dead", **grace)
    for host, job in jobs.items():
        await fleet.leaves(job, Status.PAUSED)
        fleet.open_gate(host)
        await fleet.assert_whole(host, job)
        assert await fleet.statuses(job) == ["queued", "running", "paused", "running", "succeeded"]
        await fleet.assert_whole(f"behind {host}", behind[host])


async def test_stop_after_ends_the_child_before_the_next_attempt_starts_elsewhere(fleet: Fleet) -> None:
    """Proves R21, R6: beats renew it span after span; with no worker the child is gone before the next attempt starts.

    A host that comes back later only clears up.
    """
    script = (
        'if [ "$HOLDFAST_ATTEMPT" = 2 ]; then while read -r pid; do [ ! -d "/proc/$pid" ] || exit 1; done < "$MARKER"; '
        'exit 0; fi; echo $$ >> "$MARKER"; setsid sleep 1000 & echo $! >> "$MARKER"; wait'
    )
    job = await fleet.sh(
        script, env={"MARKER": fleet.marker("job")}, max_attempts=2, stop_after=STOP_AFTER, stop_grace=0.5,
        retry={"base": 0.1, "cap": 0.1, "on": []},
    )  # fmt: skip
    worker = fleet.start({"default": 1}, host="a", heartbeat_interval=STOP_AFTER / 10)
    await fleet.marked("job", 2)
    since = boottime()
    held = await fleet.running(job)
    assert held.lease is not None
    token = held.lease.token
    folder = fleet.folder_of(job)

    def outlived() -> bool:
        """Whether three spans have passed; a child that was not renewed is stopped after the first."""
        assert folder.exit() is None, f"stopped after {boottime() - since:.1f} s, while its worker lived"
        return boottime() > since + 3 * STOP_AFTER

    await fleet.eventually(outlived, "beats keep it for three times its stop_after")
    assert all(alive(pid) for pid in fleet.marks("job"))
    worker.kill()
    fleet.start({"default": 1}, host="b", orphan_grace=0.5)
    stopped = await fleet.eventually(folder.exit, "its supervisor stops it")
    await fleet.ended(job, Status.SUCCEEDED)
    assert (stopped.cause, stopped.stopped_by) == (ExitCause.STOP_AFTER, "limit")
    assert not any(alive(pid) for pid in fleet.marks("job"))
    first, second = await fleet.store.attempts.list(job.id)
    assert (first.cause, first.token > token) == (Cause.LOST, True)
    assert first.domain != second.domain
    spec = folder.path / "spec"
    assert spec.exists()
    fleet.start({"other": 1}, host="a")
    await fleet.eventually(lambda: not spec.exists(), "its leftovers are swept, but for the mark")
    await fleet.assert_true(job)
