"""Pipelines that are tortured: a few chains of tasks that many jobs share, so that they race for the same snapshots.

Each task has a trail: where its chain began, and every step since, such as `c7.a.b`. The trail says all that the task's
result depends on, so it stands for the snapshot; it is the task's name. What a trail leads to is known beforehand.
"""

import asyncio
import contextlib
import random
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.docker_engine import IMAGE

from holdfast.client.http import AsyncClient, Refused, ServerUnreachable
from holdfast.pipeline.snapshots import OUTPUTS, TEMPORARY, SnapshotFolders
from holdfast.runner.folder_artifacts import FolderArtifacts
from torture import postgres_pipelines
from torture.final_state import fetch, to_boottime
from torture.history import Removal, StoredSnapshot, boottime
from torture.installation import SERVERS, Installation

SCRIPT = r"""
n=0
note() {
  read -r now _ < /proc/uptime
  line="$1 $HOLDFAST_JOB_ID $HOLDFAST_ATTEMPT $HOLDFAST_LEASE_TOKEN $$ $now $n $TRAIL"
  if [ -n "$PORT" ]; then echo "$line" | nc 127.0.0.1 "$PORT"; else echo "$line" >> "$JOURNAL"; fi
}
note start
[ "$(cat made whole 2> /dev/null)" = "$EARLIER" ] || note spoilt
echo "$TRAIL" >> made || exit 9
echo half > "$HOLDFAST_WORK_DIR/output/$TRAIL" || exit 9
while [ $n -lt "$LINES" ]; do
  n=$((n + 1))
  echo "$HOLDFAST_ATTEMPT $TRAIL out $n"
  echo "$TRAIL $n" >> "part $TRAIL" || exit 9
  note tick
  sleep "$PACE"
done
case "$FLAKY $HOLDFAST_ATTEMPT $HOLDFAST_JOB_ID" in "1 1 "*[0-3]) note fail; exit 3;; esac
echo "$TRAIL" > whole || exit 9
echo "$TRAIL" > "$HOLDFAST_WORK_DIR/output/$TRAIL" || exit 9
echo "$TRAIL" > "$HOLDFAST_WORK_DIR/output/last" || exit 9
[ -z "$REPORTS" ] || echo "{\"version\": 1, \"result\": \"$TRAIL\"}" > "$HOLDFAST_WORK_DIR/result.json" || exit 9
note end
"""
"""Notes what it finds amiss in its workspace, and leaves something in it from its start to its end: all, or it fails.

One that is flaky fails in the first attempt of every fourth job."""
PLAIN, CONTAINER, SERVED = "c", "d", "p"
"""How trails begin: of processes, of containers, of processes with a Postgres beside them."""
FEW = 0.06
"""How many pipelines have a Postgres beside them."""
EPOCH = 3
"""Pipelines of one client, after which it goes on to new chains."""
CHAINS = 2
MOST_STEPS = 4
SNAPSHOTS = "SELECT id, parent, task, folder, digest, made_at, job_id FROM {schema}snapshots"

Body = dict[str, Any]


def steps(trail: str) -> list[str]:
    """The trails of all tasks up to this one: `c7.a.b` comes after `c7.a`."""
    parts = trail.split(".")
    return [".".join(parts[: n + 1]) for n in range(1, len(parts))]


def content(trail: str) -> Mapping[str, str]:
    """Every file that the snapshot of a trail has, with what is in it; of a server, the rows that it has."""
    if trail.startswith(SERVED):
        return {"made": "".join(f"{step}\n" for step in steps(trail))}
    parts = {
        f"part {step}": "".join(f"{step} {n + 1}\n" for n in range(lines(step))) for step in steps(trail) if lines(step)
    }
    return {"made": "".join(f"{step}\n" for step in steps(trail)), "whole": f"{trail}\n", **parts}


def outputs(trail: str) -> tuple[str | None, Mapping[str, str]] | None:
    """The result and the artifacts of a job that ends with a trail, however much of it was known; None: not asked for.

    Those with a server leave none.
    """
    if trail.startswith(SERVED):
        return None
    reported = [step for step in steps(trail) if reports(step)]
    files = {step: f"{step}\n" for step in steps(trail)}
    return reported[-1] if reported else None, {**files, "last": f"{trail}\n"}


def reports(trail: str) -> bool:
    """Whether a task writes a result; a later one that does not leaves the result of those before it."""
    return zlib.crc32(trail.encode()) % 3 != 0


def lines(trail: str) -> int:
    """How much a task has to say."""
    return zlib.crc32(trail.encode()) % 7


class KnownSnapshots:
    """The stored snapshots that clients know of: (id, trail)."""

    def __init__(self) -> None:
        self.snapshots: Sequence[tuple[str, str]] = ()

    async def look(self, installation: Installation) -> None:
        while not installation.calm:
            with contextlib.suppress(OSError):
                (rows,) = await fetch(installation.url, SNAPSHOTS)
                self.snapshots = [(str(row["id"]), str(row["task"])) for row in rows]
            await asyncio.sleep(0.5)


class Chains:
    """Draws pipelines. `port` is where containers send their journal's lines."""

    def __init__(self, rng: random.Random, shelf: KnownSnapshots, journal: str, port: int) -> None:
        self._rng = rng
        self._shelf = shelf
        self._journal = journal
        self._port = port
        self._served = FEW if postgres_pipelines.possible() else 0.0
        self._drawn = 0

    def draw(self, *, docker: bool) -> Body:
        """One pipeline: a chain from its root, or after a snapshot that exists."""
        rng = self._rng
        kind = CONTAINER if docker else SERVED if rng.random() < self._served else PLAIN
        epoch, self._drawn = self._drawn // EPOCH, self._drawn + 1
        trail, base = f"{kind}{epoch}-{rng.randrange(CHAINS)}", None
        known = [(id, found) for id, found in self._shelf.snapshots if found.startswith(kind)]
        if known and rng.random() < 0.2:
            base, trail = rng.choice(known)
        trails = []
        for _ in range(rng.randint(1, MOST_STEPS)):
            trail += rng.choice([".a", ".a", ".a", ".b"])
            trails.append(trail)
        body: Body = {
            "runner": "docker" if docker else "process",
            "spec": self._spec(kind),
            "tasks": [self._task(trail) for trail in trails],
            "snapshot": rng.choice(["always", "always", "always", "final", "none"]),
        }
        if kind == SERVED:
            body |= {"connector": "postgres", "queue": postgres_pipelines.QUEUE}
        if base is not None:
            body["base"] = base
        if rng.random() < 0.1 and kind != SERVED:
            body["timeout"] = rng.uniform(1, 4)
        return body

    def _spec(self, kind: str) -> Body:
        if kind == CONTAINER:
            return {"image": IMAGE, "network": "host", "env": {"PORT": str(self._port)}}
        if kind == SERVED:
            return {"user": postgres_pipelines.USER}
        return {"env": {"JOURNAL": self._journal, "PORT": ""}}

    def _task(self, trail: str) -> Body:
        """What the trail says, and nothing else: jobs that name it mean the same."""
        before = steps(trail)[:-1]
        if trail.startswith(SERVED):
            return postgres_pipelines.task(trail, before, lines(trail), self._journal)
        env = {
            "TRAIL": trail,
            "EARLIER": "\n".join([*before, *before[-1:]]),
            "LINES": str(lines(trail)),
            "PACE": "0.3" if lines(trail) > 4 else "0.05",
            "FLAKY": "1" if zlib.crc32(trail.encode()) % 5 == 0 else "",
            "REPORTS": "1" if reports(trail) else "",
        }
        return {"name": trail, "command": ["sh", "-c", SCRIPT], "env": env}


async def remove_on(installation: Installation, shelf: KnownSnapshots, rng: random.Random) -> None:
    """Remove a snapshot now and then, with all that was made from it, whether or not it is needed."""
    clients = [AsyncClient(installation.url_of(server), tries=1) for server in SERVERS]
    while not installation.calm:
        await asyncio.sleep(rng.expovariate(0.2))
        if not shelf.snapshots or installation.calm:
            continue
        id, trail = rng.choice(shelf.snapshots)
        removal = Removal(trail=trail, sent=boottime())
        installation.history.removals.append(removal)
        with contextlib.suppress(Refused, ServerUnreachable):
            query = {"force": "true", "recurse": "true"}
            await rng.choice(clients).request("DELETE", f"/v1/snapshots/{id}", query=query)
            removal.answered = boottime()
    for client in clients:
        await client.close()


def read_outputs(installation: Installation) -> None:
    """Add the artifacts of every pipeline's last attempt to the history, which has the database's rows by now."""
    history, artifacts = installation.history, FolderArtifacts(installation.shared)
    for job in history.tasks:
        if attempts := history.attempts.get(job):
            history.outputs[job] = _files(artifacts.folder(job, attempts[-1].attempt, attempts[-1].token))


async def read_snapshots(installation: Installation) -> None:
    """Add what is in the store to the history: everything that has a row, and what a sweep does not take away.

    Nobody may be alive who builds.
    """
    (rows,) = await fetch(installation.url, SNAPSHOTS)
    folders = SnapshotFolders.below(installation.shared)
    recorded = {str(row["folder"]) for row in rows}
    folders.sweep(recorded, grace=0.0)
    temporary = folders.root / TEMPORARY
    installation.history.unnamed = [name for name in folders.names() if name not in recorded]
    installation.history.unnamed += _without_their_snapshot(folders)
    installation.history.unnamed += sorted(path.name for path in temporary.iterdir()) if temporary.is_dir() else []
    for row in rows:
        id, trail, folder, digest = (str(row[name]) for name in ("id", "task", "folder", "digest"))
        if verified := folders.verify(folder, digest):
            served = trail.startswith(SERVED)
            runs = installation.folder / "runs"
            files = (
                postgres_pipelines.rows_of(folders, id, folder, digest, runs)
                if served
                else _files(folders.root / folder)
            )
        kept = StoredSnapshot(
            id=id, trail=trail, parent=str(row["parent"]), job=str(row["job_id"]), made=to_boottime(row["made_at"]),
            verified=verified, files=files if verified else {},
        )  # fmt: skip
        installation.history.kept.append(kept)


def _without_their_snapshot(folders: SnapshotFolders) -> list[str]:
    """The folders of outputs whose snapshot's own folder is gone."""
    found = folders.root.glob(f"*{OUTPUTS}")
    return sorted(path.name for path in found if not path.with_name(path.name.removesuffix(OUTPUTS)).is_dir())


def _files(place: Path) -> Mapping[str, str]:
    found = sorted(path for path in place.rglob("*") if path.is_file())
    return {str(path.relative_to(place)): path.read_text(errors="replace") for path in found}
