"""A hostile job that will not end, or leaves something for later jobs: processes, files, shared memory."""

import asyncio
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Status
from tests.support.hostile import Installation, Runs, by_both, installation
from tests.support.in_process_workers import eventually
from tests.support.supervisor_harness import AS_NOBODY, needs_root
from tests.support.worker_processes import alive

ESCAPE = """
import json, os, signal, sys, time
def escaped():
    os.closerange(0, 1000)
    for number in range(1, signal.NSIG):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    os.execve("/bin/sh", ["sleeper", "-c", "while :; do sleep 1; done"], {})
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writer, str(os.getpid()).encode())
        escaped()
    os._exit(0)
os.wait()
pid = int(os.read(reader, 20))
print("PID " + str(pid), flush=True)
while os.environ.get("STAY"):
    time.sleep(1)
"""
"""Leaves a process that has no parent, session, environment or descriptor of the job, and ignores signals."""


async def escaped_pid(site: Installation, job: Any) -> int:
    async def reported() -> str | None:
        return next((line for line in await site.log(job) if line.startswith("PID ")), None)

    return int((await eventually(reported, "the job has escaped")).split()[1])


@by_both
async def test_double_fork_does_not_outlive_its_job(clean_url: str, runs: Runs) -> None:
    """Proves I1."""
    async with installation(clean_url, runs) as site:
        job = await site.submit(ESCAPE)
        pid = await escaped_pid(site, job)
        await site.ended(job, Status.SUCCEEDED)
        assert not alive(pid)


@needs_root
async def test_nothing_of_a_job_outlives_a_supervisor_that_was_killed(clean_url: str) -> None:
    """As root, leftovers are found by their user, also without the environment and the session. Proves I1."""
    async with installation(clean_url, "root") as site:
        job = await site.submit(ESCAPE, env={"STAY": "1"}, on_lost="fail")
        pid = await escaped_pid(site, job)
        os.kill(site.processes.supervisor_of(job), signal.SIGKILL)
        ended = await site.ended(job, Status.FAILED)
        assert ended.error is not None
        assert ended.error.code == "lost"
        assert not alive(pid)


OPENS = """
import os, shutil, time
for folder in (".", "/tmp"):
    shutil.copy("/usr/bin/id", folder + "/id")
    os.chmod(folder + "/id", 0o6755)
    with open(folder + "/notes", "w") as file:
        file.write("mine")
    os.chmod(folder + "/notes", 0o666)
    os.chmod(folder, 0o777)
print("open", flush=True)
time.sleep(600)
"""
"""Opens its folders to everybody, with a program in them that runs with its user's rights."""


@needs_root
async def test_local_user_gets_nothing_from_a_job_that_opens_its_folders(clean_url: str) -> None:
    """Its uid is used again later, so no local user may become it or keep its program open.

    Proves I1.
    """
    async with installation(clean_url, "root") as site:
        job = await site.submit(OPENS)

        async def opened() -> bool:
            return "open" in await site.log(job)

        await eventually(opened, "the job has opened its folders")
        folder = site.processes.folder_of(job).path
        for command in ("exec work/id", "exec tmp/id", "cat work/notes", "ls tmp", "touch work/x"):
            program, _, path = command.partition(" ")
            # By way of a shell: setpriv itself still has root's rights when it looks its program up.
            tried = await asyncio.to_thread(
                subprocess.run, [*AS_NOBODY, "sh", "-c", f"{program} {folder / path}"],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert tried.returncode != 0, (command, tried.stdout)
            assert "Permission denied" in tried.stderr, tried.stderr
        await site.processes.store.jobs.cancel(job.id, tenant="red")
        await site.ended(job, Status.CANCELLED)


LEAVES = """
import ctypes, json, os
libc = ctypes.CDLL(None, use_errno=True)
left = []
for place in ("/tmp", "/var/tmp", "/dev/shm", "/run/lock", "/dev/mqueue"):
    try:
        with open(place + "/left-" + os.environ["HOLDFAST_JOB_ID"], "w") as file:
            file.write("left")
        left.append(file.name)
    except OSError:
        pass
libc.shmget(0x48460000 + os.getuid() % 0xFFFF, 4096, 0o1666)
libc.msgget(0x48460000 + os.getuid() % 0xFFFF, 0o1666)
libc.semget(0x48460000 + os.getuid() % 0xFFFF, 1, 0o1666)
with open("result.json", "w") as file:
    json.dump({"version": 1, "result": {"uid": os.getuid(), "left": left}}, file)
"""


def there(path: str | Path) -> bool:
    return os.path.lexists(path)


def objects_of(uid: int, kind: str) -> list[str]:
    """The System V objects of a user on the host."""
    return [line for line in Path("/proc/sysvipc", kind).read_text().splitlines()[1:] if str(uid) in line.split()]


@needs_root
async def test_nothing_of_a_uid_is_left_for_its_next_attempt(clean_url: str) -> None:
    """Neither files where everybody may write, nor System V objects, nor its folder. Proves I1."""
    async with installation(clean_url, "root") as site:
        job = await site.submit(LEAVES)
        ended = await site.ended(job, Status.SUCCEEDED)
        uid = ended.result["uid"]
        assert len(ended.result["left"]) >= 3
        claim = site.processes.settings.process_uids_dir / str(uid)

        async def freed() -> bool:
            return not there(claim)

        await eventually(freed, "the uid is free")
        assert [path for path in ended.result["left"] if there(path)] == []
        for kind in ("shm", "msg", "sem"):
            assert objects_of(uid, kind) == [], kind
        assert site.processes.folders_of() == []


FILLS = """
import errno, sys
block = b"x" * (1 << 20)
with open("/dev/shm/filled", "wb", 0) as file:
    for n in range(400):
        try:
            file.write(block)
        except OSError as error:
            sys.exit(0 if error.errno == errno.ENOSPC and n >= 200 else 4)
sys.exit(3)
"""


@needs_root
async def test_shared_memory_of_a_job_is_limited(clean_url: str) -> None:
    async with installation(clean_url, "root") as site:
        await site.ended(await site.submit(FILLS), Status.SUCCEEDED)


TELLS = """
import json, os, time
with open("result.json", "w") as file:
    json.dump({"version": 1, "result": os.getresuid() + os.getresgid()}, file)
print("up", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
"""
"""Writes its users and groups as its result, and stays until there is a file `go`."""


@needs_root
async def test_attempts_have_different_users_and_none_is_root(clean_url: str) -> None:
    """Proves I1."""
    async with installation(clean_url, "root") as site:
        jobs = [await site.submit(TELLS) for _ in range(4)]
        for job in jobs:
            await eventually(lambda job=job: site.log(job), "it runs")  # type: ignore[misc]
        for job in jobs:  # All run at once: a user who is free again may be used again.
            (site.processes.folder_of(job).path / "work" / "go").touch()
        ids = [(await site.ended(job, Status.SUCCEEDED)).result for job in jobs]
        assert all(len(set(one)) == 1 for one in ids)
        assert len({one[0] for one in ids}) == len(jobs)
        assert all(one[0] >= 1_000_000 for one in ids)


@needs_root
@pytest.mark.parametrize("user", ["2100000007", "1000:2100000007"])
async def test_users_and_groups_of_attempts_cannot_be_named(clean_url: str, user: str) -> None:
    async with installation(clean_url, "root") as site:
        job = await site.submit("print('started')", spec={"user": user})
        ended = await site.ended(job, Status.FAILED)
        assert ended.error is not None
        assert "HOLDFAST_PROCESS_UIDS" in ended.error.message
        assert await site.log(job) == []


CHECK = """
id -u >&2
cat {store} {token} /proc/{worker}/environ >&2
ls -l /proc/self/fd | grep -v ' [012] -> ' | grep -- ' -> ' >&2
env | grep -c SECRET >&2
(setsid sh -c 'while :; do sleep 1; done' < /dev/null > /dev/null 2>&1 &)
exit 1
"""
"""What a readiness check tries before its job starts."""


@needs_root
async def test_check_has_the_rights_of_a_job_and_leaves_nothing_running(clean_url: str) -> None:
    """Proves I1."""
    async with installation(clean_url, "root") as site:
        data = site.processes.settings.data_dir
        token = data / "admin.token"
        token.write_text("hf_secret")
        token.chmod(0o600)
        script = CHECK.format(store=data / "store.db", token=token, worker=site.worker.pid)
        check = {"command": ["sh", "-c", script], "timeout": 2}
        job = await site.submit("print('started')", check=check)
        ended = await site.ended(job, Status.PAUSED)
        assert ended.error is not None
        assert ended.error.code == "not_ready"
        reported = [event.data for event in (await site.processes.store.events.page(job.id, tenant="red")).items]
        text = str(reported) + ended.error.message
        assert "hf_secret" not in text
        assert "WORKER_SECRET" not in text
        assert "started" not in await site.log(job)

        async def quiet() -> bool:
            return processes_of_attempts(site) == []

        await eventually(quiet, "nothing of the check runs")


def processes_of_attempts(site: Installation) -> list[int]:
    """What runs as a user of an attempt whose folder is in this installation."""
    claims = site.processes.settings.process_uids_dir
    below = str(site.processes.folder)
    uids = {int(name) for name in os.listdir(claims) if name.isdigit() and _owner(claims / name).startswith(below)}
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and _uid(entry) in uids]


def _owner(claim: Path) -> str:
    try:
        return os.readlink(claim)
    except OSError:
        return ""


def _uid(process: Path) -> int:
    try:
        return process.stat().st_uid
    except OSError:
        return -1
