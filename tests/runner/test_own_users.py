"""As root each attempt has a user of its own: from its start to the end of its folder, adopted or not."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Status
from holdfast.runner.process import ProcessRunner
from holdfast.runner.state_folder import StateFolder
from holdfast.runner.uids import UidPool
from tests.support.crashing_worker import Hook
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.pipelines import open_folder
from tests.support.supervisor_harness import needs_root
from tests.support.worker_processes import WorkerProcesses

pytestmark = needs_root

FIRST, LAST = 2_100_000_000, 2_100_000_063
RANGE = f"{FIRST}-{LAST}"
STEPS = ("prepared", "spawned", "started", "collected", "classified", "finished")


@pytest.fixture
def own(workers: InProcessWorkers) -> Iterator[InProcessWorkers]:
    """Workers whose attempts have their own users."""
    with open_folder() as folder:
        workers.set(data_dir=folder, process_user=None, process_uids=RANGE, process_uids_dir=folder / "uids")
        yield workers


@pytest.fixture
def own_processes(processes: WorkerProcesses) -> Iterator[WorkerProcesses]:
    """Worker processes whose attempts have their own users."""
    with open_folder() as folder:
        processes.folder = folder
        processes.set(data_dir=folder, process_user=None, process_uids=RANGE, process_uids_dir=folder / "uids")
        yield processes
        processes.clear()


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def there(path: str) -> bool:
    return os.path.exists(path)


def claims(workers: InProcessWorkers) -> list[str]:
    return [name for name in os.listdir(workers.settings.process_uids_dir) if name.isdigit()]


async def freed(workers: InProcessWorkers) -> None:
    async def look() -> bool:
        return not claims(workers)

    await eventually(look, "all uids are free")


async def test_each_attempt_has_a_uid_of_its_own(own: InProcessWorkers) -> None:
    """It is freed at the end. Its user has a name, a group and a home, and /tmp is its own. Proves I1."""
    name = f"holdfast-test-{os.urandom(4).hex()}"
    jobs = [
        await own.sh(
            f"id -u; id -G; id -un; stat -c '%u %a' . /tmp request.json; echo ~; touch /tmp/{name} /dev/shm/{name}"
        )
        for _ in range(8)
    ]
    async with own.worker():
        logs = []
        for job in jobs:
            await own.ended(job, Status.SUCCEEDED)
            logs.append(await own.log(job))
        await freed(own)
    uids = {lines[0] for lines in logs}
    assert len(uids) == 8
    assert all(FIRST <= int(uid) <= LAST for uid in uids)
    for uid, groups, user, work, tmp, request, home in logs:
        assert (groups, user) == (uid, f"holdfast-{uid}")
        assert (work, tmp, request) == (f"{uid} 700", f"{uid} 700", f"{uid} 600")
        assert home.endswith("/work")
    assert not there(f"/dev/shm/{name}")
    assert not there(f"/tmp/{name}")


async def test_a_user_that_is_named_is_used(own: InProcessWorkers) -> None:
    """But not one of the range, which another attempt has or may get."""
    named = await own.command("id", "-un", spec={"user": "nobody"})
    taken = await own.command("id", spec={"user": str(FIRST + 3)})
    async with own.worker():
        await own.ended(named, Status.SUCCEEDED)
        refused = await own.ended(taken, Status.FAILED)
        assert await own.log(named) == ["nobody"]
        assert claims(own) == []
    assert refused.error is not None
    assert "HOLDFAST_PROCESS_UIDS" in refused.error.message


async def test_a_job_waits_while_all_uids_are_in_use(own: InProcessWorkers) -> None:
    """It does not fail, and `explain` says why it waits. Proves I1."""
    own.set(process_uids=f"{FIRST}-{FIRST}")
    first = await own.sh("while [ ! -e go ]; do sleep 0.05; done")
    async with own.worker():
        await own.running(first)
        second = await own.sh("id -u")

        async def explained() -> bool:
            return "uids of HOLDFAST_PROCESS_UIDS" in str(await own.store.explain.job(second.id))

        await eventually(explained, "explain names the setting")
        (folder,) = [path for path in own.settings.state.glob("attempts/*/*.1") if first.id in path.name]
        (folder / "work" / "go").touch()
        await own.ended(first, Status.SUCCEEDED)
        ended = await own.ended(second, Status.SUCCEEDED)
    assert len(await own.log(second)) == 1
    assert ended.attempts == 1


async def test_leftovers_of_a_killed_supervisor_are_found_by_uid(own: InProcessWorkers) -> None:
    """Also in a session of its own and without the mark in its environment; the uid is free after that. Proves I1."""
    job = await own.sh(
        "setsid env -i sh -c 'echo $$ > pid; exec sleep 600' & while [ ! -s pid ]; do sleep 0.01; done; wait"
    )
    async with own.worker():
        await own.running(job)

        async def pid() -> int | None:
            found = list(own.settings.state.glob("attempts/*/*.1/work/pid"))
            return int(found[0].read_text() or 0) if found else None

        left = await eventually(pid, "the grandchild lives")
        (started,) = own.settings.state.glob("attempts/*/*.1/started")
        os.kill(json.loads(started.read_text())["supervisor_pid"], signal.SIGKILL)
        await own.ended(job, Status.FAILED)
        await freed(own)
    assert not lives(left)


async def test_a_uid_is_kept_over_adoption(own: InProcessWorkers) -> None:
    """The next worker finds it by the folder, and frees it at the end. Proves I1."""
    job = await own.sh("id -u; while [ ! -e go ]; do sleep 0.05; done; id -u")
    async with own.worker():
        await own.running(job)
    (uid,) = claims(own)
    async with own.worker():
        (folder,) = own.settings.state.glob("attempts/*/*.1")
        (folder / "work" / "go").touch()
        await own.ended(job, Status.SUCCEEDED)
        await freed(own)
    assert await own.log(job) == [uid, uid]


async def test_an_attempt_whose_claim_was_lost_gets_it_back(own: InProcessWorkers) -> None:
    """Unless another attempt has the uid by then: its files become holdfast's."""
    attempts = own.settings.state / "attempts" / await own.store.installation()
    attempts.mkdir(parents=True)
    for name, uid in (("a.1", FIRST), ("b.1", FIRST + 1)):
        (attempts / name / "work").mkdir(parents=True)
        (attempts / name / "work" / "file").touch()
        os.chown(attempts / name / "work", uid, uid)
        os.chown(attempts / name / "work" / "file", uid, uid)
    uids = UidPool(FIRST, LAST, own.settings.process_uids_dir)
    assert uids.reclaim(FIRST + 1, Path("/elsewhere/c.1"))
    async with own.worker():
        assert uids.owner(FIRST) == attempts / "a.1"
        assert (attempts / "b.1" / "work" / "file").stat().st_uid == 0


async def test_a_worker_killed_at_any_step_keeps_one_uid_and_leaves_none(own_processes: WorkerProcesses) -> None:
    """The adopter goes on with the same uid; what nobody removed, the sweep frees. Proves I1."""
    processes = own_processes
    slow: Any = {"lease_ttl": 60.0, "heartbeat_interval": 1.0, "adopt_backoff": 0.1}
    jobs = {step: await processes.sh("id -u; sleep 1; id -u", queue=step) for step in STEPS}
    for step in STEPS:
        victim = processes.start({step: 1}, Hook(step=step, do="kill"), adopts=False, **slow)
        assert await victim.dead() == -signal.SIGKILL, step
    survivor = processes.start(dict.fromkeys(STEPS, 1), **slow)
    for step, job in jobs.items():
        await processes.ended(job, Status.SUCCEEDED)
        first, second = await processes.log(job)
        assert FIRST <= int(first) == int(second) <= LAST, step
    survivor.signal(signal.SIGTERM)
    await survivor.dead()
    uids = UidPool(FIRST, LAST, processes.settings.process_uids_dir)
    runner = ProcessRunner(
        StateFolder(processes.host("a")),
        processes.installation,
        user=None,
        uids=uids,
        log_cap=1 << 20,
        keep_marker_for=0,
    )

    async def swept() -> bool:  # Not at once: what the last worker began to remove may still be on its way.
        for identity in await runner.remaining_attempts():
            await runner.sweep(identity)
        await runner.sweep_incomplete(-1)  # A worker may have been killed while a thread of it was making the folder.
        await runner.slowly(lambda: runner.users.sweep(-1))
        return not claims(processes)

    await eventually(swept, "all uids are free")
    runner.close()
