"""A hostile job beside a victim's: what it can read, signal and change of others, as root and as an ordinary user."""

import os
from pathlib import Path
from typing import Any

from tests.support.hostile import ORDINARY, SECRET, Installation, VictimDetails, installation
from tests.support.supervisor_harness import needs_root

WORKER_ENVIRONMENT = (
    "HOLDFAST_DATABASE_URL",
    "HOLDFAST_SECRET_WORKER_SECRET",
    "HOLDFAST_DATA_DIR",
    "PYTEST_CURRENT_TEST",
)


def targets_of(site: Installation, victim: VictimDetails) -> dict[str, Any]:
    """Everything that an attacker who knows holdfast's source would look for."""
    processes = site.processes
    supervisor = processes.supervisor_of(victim.job)
    folder = processes.folder_of(victim.job).path
    data = processes.settings.data_dir
    (data / "admin.token").write_text("hf_secret")
    (data / "admin.token").chmod(0o600)
    os.chown(data / "admin.token", data.stat().st_uid, data.stat().st_gid)
    store = {path.name: str(path) for path in data.glob("store.db*")}
    inside = ("spec", "log", "started", "lock", "stdin", "secrets")
    held = {f"victim's {name}": str(folder / name) for name in inside}
    made = {f"victim's file {n}": path for n, path in enumerate(victim.files)}
    host = processes.host("a")
    return {
        "secret": SECRET,
        "worker_environment": WORKER_ENVIRONMENT,
        "pids": {"victim": victim.pid, "supervisor": supervisor, "worker": site.worker.pid, "init": 1},
        "address": victim.address,
        "segment": victim.segment,
        "victim_uid": victim.uid,
        "read": store | held | made | {
            "admin.token": str(data / "admin.token"),
            "victim's request.json": str(folder / "work/request.json"),
            "shared folder's id": str(data / "shared/holdfast-folder.json"),
            "host": str(host / "host"), "boots": str(host / "boots"),
        },
        "list": {
            "data folder": str(data), "attempts": str(folder.parent), "victim's folder": str(folder),
            "victim's commands": str(folder / "cmd"), "victim's work folder": str(folder / "work"),
            "shared folder": str(data / "shared"), "state folder": str(host), "workers": str(host / "workers"),
        },
        "write": store | {
            f"victim's {name}": str(folder / name) for name in ("cmd/stop", "exit", "started", "spec", "log", "work/x")
        } | {"data folder": str(data / "x"), "attempts": str(folder.parent / "x")},
        "link": store | {"victim's file": victim.files[0], "victim's log": str(folder / "log")},
        "replace": made | {"victim's folder": str(folder), "victim's work folder": str(folder / "work")},
        "abstract": holdfast_sockets(site.worker.pid, supervisor),
    }  # fmt: skip


def holdfast_sockets(*pids: int) -> list[str]:
    """The abstract sockets that processes of holdfast listen on: none, but an attacker looks."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(entry)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return [line[7][1:] for line in lines if len(line) > 7 and line[7].startswith("@") and line[6] in inodes]


def got(result: dict[str, Any]) -> list[str]:
    return [f"{name}: {outcome}" for name, outcome in result["found"].items() if not outcome.startswith("refused")]


@needs_root
async def test_hostile_job_of_root_reaches_nothing_of_others(clean_url: str) -> None:
    """Proves I1, I2."""
    async with installation(clean_url, "root") as site:
        victim = await site.victim()
        result = await site.attack(targets_of(site, victim))
        assert not (reached := got(result)), "\n".join(reached)
        assert len(result["found"]) > 80
        assert len({result["uid"], victim.uid, 0}) == 3
        await site.stop(victim.job)


async def test_jobs_of_an_ordinary_user_have_only_its_rights(clean_url: str) -> None:
    """Without root a job runs as its worker's user, as documented; it cannot reach other users."""
    async with installation(clean_url, "ordinary user") as site:
        victim = await site.victim()
        result = await site.attack(targets_of(site, victim))
        found = result["found"]
        assert result["uid"] == victim.uid == ORDINARY
        reached = {name for name, outcome in found.items() if not outcome.startswith("refused")}
        own = (
            "victim ", "supervisor ", "worker ", "read ", "list ", "write ", "hard link ", "rename ", "mode ", "uid of",
            "init cmdline",
        )  # fmt: skip
        assert {name for name in reached if not name.startswith(own)} == set()
        assert {
            "victim environ", "victim signal", "supervisor signal", "worker environ", "read admin.token",
            "read victim's log", "write victim's cmd/stop", "write victim's exit",
        } <= reached  # fmt: skip
        await site.stop(victim.job)
