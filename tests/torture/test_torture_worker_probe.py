"""The probe inside a worker under test: it records heartbeats, writes with their tokens, and stalls."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torture.history import History, boottime, read_probe
from torture.processes import ROOT, state

STOPPED_SECONDS = 0.6
WORKER = """
import asyncio, os, signal, sys, time
from pathlib import Path
import msgspec
from holdfast.model import Claimable, Outcome
from holdfast.store.migrate import migrate
from holdfast.store.store import Store, connect
from torture.worker_probe import watch

async def main():
    database = await connect(sys.argv[2])
    await migrate(database)
    async with Store(database) as store:
        job = await store.jobs.submit({"runner": "function", "spec": {"name": "greet"}})
        greet = Claimable(queue="default", capability="function:greet", domain="function")
        (lease,) = (await store.leases.claim("w1", [greet], slots=1, ttl=60)).claimed
        stale = msgspec.structs.replace(lease, token=lease.token - 1)
        await store.leases.beat("w1", [lease], ttl=60)
        try:
            await store.leases.beat("w1", [lease], ttl=-1)
        except Exception:
            pass
        for mine in (lease, stale):
            await store.events.append(mine, 1, [], offsets=(0, 0), old_offsets=(0, 0))
            await store.leases.finish([(mine, Outcome.succeeded())])
        await store.leases.hand_over([stale])
    print(job.id, lease.token, flush=True)

watch(Path(sys.argv[1]), "w1")
asyncio.run(main())
os.kill(os.getpid(), signal.SIGSTOP)
while b"lag" not in Path(sys.argv[1]).read_bytes():
    time.sleep(0.01)
"""


def test_heartbeats_writes_and_lags_are_noted(tmp_path: Path) -> None:
    """Proves L4, L18 as far as the probe can tell.

    It records a beat that renewed, one that failed, writes that landed, writes with an older token that did not, and
    the time without CPU.
    """
    began = boottime()
    command = [sys.executable, "-c", WORKER, str(tmp_path / "witness"), f"sqlite:///{tmp_path}/store.db"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        job, token = worker.stdout.readline().split()
        while state(worker.pid) != "T":
            time.sleep(0.001)  # Reason: the kernel sends no event.
        stopped = boottime()
        time.sleep(STOPPED_SECONDS)  # Reason: this is what is measured.
        os.kill(worker.pid, signal.SIGCONT)
        assert worker.wait(30) == 0
    history = History(seed=0, store="sqlite", ttl=60.0)
    read_probe(tmp_path / "witness", history)
    assert [(beat.worker, beat.renewed) for beat in history.beats] == [("w1", [(job, int(token))]), ("w1", None)]
    assert all(began < beat.asked <= beat.answered for beat in history.beats)
    now, old = int(token), int(token) - 1
    assert [(write.what, write.job, write.token, write.landed) for write in history.writes] == [
        ("append", job, now, True), ("finish", job, now, True),
        ("append", job, old, False), ("finish", job, old, False),
        ("hand_over", job, old, True),
    ]  # fmt: skip
    assert all(began < write.asked <= write.answered for write in history.writes)
    assert any(lag.worker == "w1" and lag.end > stopped + STOPPED_SECONDS for lag in history.lags)
