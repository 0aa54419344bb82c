"""Pipelines with a real Postgres in their workspace: SQL, snapshots of a stopped server, what opens from them."""

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.model import Snapshot, Status
from tests.support.cluster import binaries
from tests.support.in_process_workers import InProcessWorkers
from tests.support.pipelines import Pipelines, open_folder
from tests.support.worker_processes import alive

USER = "postgres"
"""Who may run a server, where the tests are root's."""
SCHEMA = "CREATE TABLE fruit (id integer PRIMARY KEY, name text NOT NULL);\n"
SEED = "INSERT INTO fruit SELECT n, 'fruit ' || n FROM generate_series(1, 1000) AS n;\n"
MIGRATION = "ALTER TABLE fruit ADD COLUMN ripe boolean NOT NULL DEFAULT false;\nUPDATE fruit SET ripe = id % 2 = 0;\n"


@pytest.fixture
def kind() -> str:
    """A server in a workspace knows nothing of the store; those in containers run on the other one."""
    return "sqlite"


@pytest.fixture
def pipelines(workers: InProcessWorkers) -> Iterator[Pipelines]:
    with open_folder() as folder:
        workers.set(data_dir=folder)
        workers.set(process_user=None, process_uids_dir=folder / "uids")
        pipelines = Pipelines(workers, folder)
        for name, text in {"schema": SCHEMA, "seed": SEED, "migration": MIGRATION}.items():
            (pipelines.inputs / f"{name}.sql").write_text(text)
        yield pipelines


def sql(name: str) -> dict[str, Any]:
    return {"name": name, "sql": f"{name}.sql"}


STEPS = (sql("schema"), sql("seed"), sql("migration"))


def as_user(*command: str | Path) -> str:
    user = USER if os.geteuid() == 0 else None
    done = subprocess.run(command, capture_output=True, text=True, check=True, user=user, group=user, cwd="/")
    return done.stdout


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A short folder for a server that opens a copy of a snapshot."""
    folder = Path(as_user("mktemp", "-d", "/tmp/hf-XXXXXX").strip())
    yield folder
    shutil.rmtree(folder)


def query(pipelines: Pipelines, snapshot: Snapshot, scratch: Path, text: str) -> tuple[str, str]:
    """Open a copy of a snapshot and ask it something; return the answer, and what the server said."""
    data = scratch / snapshot.id[:8]
    subprocess.run(["cp", "-a", pipelines.folder_of(snapshot) / "data", data], check=True)
    if os.geteuid() == 0:
        subprocess.run(["chown", "-R", USER, data], check=True)
    control = binaries() / "pg_ctl"
    options = f"-c listen_addresses= -c unix_socket_directories={scratch}"
    as_user(control, "-D", data, "-w", "-l", scratch / "log", "-o", options, "start")
    try:
        answer = as_user("psql", "-X", "-At", "-h", scratch, "-U", "postgres", "-c", text)
    finally:
        as_user(control, "-D", data, "-m", "fast", "-w", "stop")
    return answer.strip(), (scratch / "log").read_text()


async def test_every_snapshot_opens_cleanly_and_holds_exactly_its_rows(pipelines: Pipelines, scratch: Path) -> None:
    """Proves P8, P1, P7."""
    workers = pipelines.workers
    async with workers.worker():
        job = await workers.ended(await pipelines.submit(*STEPS, connector="postgres"), Status.SUCCEEDED)
    assert await pipelines.statuses(job) == ["succeeded"] * 3
    found = {snapshot.task: snapshot for snapshot in await pipelines.snapshots()}
    count = "SELECT count(*), coalesce(sum(id), 0) FROM fruit"
    expected = {"schema": "0|0", "seed": "1000|500500", "migration": "1000|500500"}
    for name, rows in expected.items():
        answer, said = query(pipelines, found[name], scratch, count)
        assert (name, answer) == (name, rows)
        assert "not properly shut down" not in said
        assert "redo" not in said
        assert "FATAL" not in said
    ripe, _ = query(pipelines, found["migration"], scratch, "SELECT count(*) FROM fruit WHERE ripe")
    assert ripe == "500"
    assert workers.folders == []


async def test_second_run_starts_no_server(pipelines: Pipelines) -> None:
    """Proves P4, P8; and a new step begins with the rows of those before it, beside a command that connects."""
    workers = pipelines.workers
    asks = 'psql -X -At -c "SELECT count(*) FROM fruit WHERE ripe"'
    command = {"name": "ask", "command": ["sh", "-c", asks]}
    async with workers.worker():
        await workers.ended(await pipelines.submit(*STEPS, connector="postgres"), Status.SUCCEEDED)
        again = await workers.ended(await pipelines.submit(*STEPS, connector="postgres"), Status.SUCCEEDED)
        more = await workers.ended(await pipelines.submit(*STEPS, command, connector="postgres"), Status.SUCCEEDED)
    assert (again.attempts, await pipelines.statuses(again)) == (0, ["cached"] * 3)
    assert await pipelines.statuses(more) == ["cached"] * 3 + ["succeeded"]
    assert await workers.log(more) == ["500"]


async def test_error_in_sql_fails_the_task_and_keeps_nothing(pipelines: Pipelines) -> None:
    """Proves P8, P7: psql stops at the first error, and its words are in the log."""
    workers = pipelines.workers
    (pipelines.inputs / "wrong.sql").write_text("SELECT 1;\nSELECT nothing;\nSELECT 2;\n")
    async with workers.worker():
        job = await workers.ended(
            await pipelines.submit(sql("schema"), sql("wrong"), connector="postgres"), Status.FAILED
        )
    assert await pipelines.statuses(job) == ["succeeded", "failed"], job.error
    assert await pipelines.kept() == ["schema"]
    assert any('column "nothing" does not exist' in line for line in await workers.log(job, "stderr"))


async def test_error_in_sql_names_the_developers_own_file_and_line(pipelines: Pipelines) -> None:
    """Proves G7: through includes, before and after them."""
    workers = pipelines.workers
    (pipelines.inputs / "parts").mkdir()
    (pipelines.inputs / "parts" / "good.sql").write_text("SELECT 1;\nSELECT 2;")
    (pipelines.inputs / "parts" / "bad.sql").write_text("SELECT 3;\n\nSELECT nothing;\n")
    (pipelines.inputs / "inner.sql").write_text("SELECT 0;\n\\i parts/good.sql\n\\ir parts/bad.sql\nSELECT 4;\n")
    (pipelines.inputs / "after.sql").write_text("\\i parts/good.sql\nSELECT 5;\nSELECT\n  nothing;\n")
    expected = {"inner": "parts/bad.sql:3", "after": "after.sql:4"}
    jobs = {name: await pipelines.submit(sql(name), connector="postgres") for name in expected}
    async with workers.worker():
        for name, where in expected.items():
            job = await workers.ended(jobs[name], Status.FAILED)
            line = f'psql:{where}: ERROR:  column "nothing" does not exist'
            assert line in await workers.log(job, "stderr")
            assert job.error is not None
            assert job.error.message == f"task {name}: exit code 3: {line.replace('  ', ' ')}"


async def test_cancel_stops_the_server_fast(pipelines: Pipelines) -> None:
    """Proves P8, P7, C1: it shuts down by itself, within the grace."""
    workers = pipelines.workers
    (pipelines.inputs / "slow.sql").write_text("\\echo here\nSELECT pg_sleep(600);\n")
    async with workers.worker():
        job = await pipelines.submit(sql("schema"), sql("slow"), connector="postgres", stop_grace=30)
        await workers.wait_for_log(job, "here")
        (folder,) = workers.folders
        server = folder / "space" / "tree" / "data"
        pid = (server / "postmaster.pid").read_text().split()[0]
        assert alive(pid)
        await workers.store.jobs.cancel(job.id)
        await workers.ended(job, Status.CANCELLED)
    assert not alive(pid)
    assert not server.exists()
    assert await pipelines.kept() == ["schema"]
    phases = [event.data["cancel"] for event in await workers.events(job, "cancel")]
    assert phases == ["requested", "signalled", "dead"]


async def test_server_that_dies_fails_the_job(pipelines: Pipelines) -> None:
    """Proves P8: and what it was at is not kept."""
    workers = pipelines.workers
    kills = {"name": "kill", "command": ["sh", "-c", "kill -KILL $(head -n 1 data/postmaster.pid); sleep 600"]}
    async with workers.worker():
        job = await workers.ended(await pipelines.submit(sql("schema"), kills, connector="postgres"), Status.FAILED)
    assert job.error is not None
    assert job.error.code == "service_ended"
    assert "postgres ended by itself, signal 9; its last output: " in job.error.message
    assert "database system is ready to accept connections" in job.error.message
    assert await pipelines.kept() == ["schema"]


async def test_server_that_does_not_shut_down_cleanly_is_not_copied(pipelines: Pipelines) -> None:
    """Proves P8: it ends when it is told to, but cannot write its last checkpoint."""
    workers = pipelines.workers
    breaks = {"name": "break", "command": ["chmod", "400", "data/global/pg_control"]}
    async with workers.worker():
        asked = await pipelines.submit(sql("schema"), breaks, connector="postgres")
        job = await workers.ended(asked, Status.FAILED)
    assert job.error is not None
    assert (job.error.code, job.error.message) == (
        "not_quiet",
        "Postgres was not shut down cleanly: it is in production",
    )
    assert await pipelines.kept() == ["schema"]


NO_ENTRY = 54321


@pytest.mark.skipif(os.geteuid() != 0, reason="about root")
async def test_user_without_a_passwd_entry_has_a_server(pipelines: Pipelines) -> None:
    """Proves P8, R25: initdb refuses a user that it cannot look up; the cluster is that user's all the same."""
    with pytest.raises(KeyError):
        pwd.getpwuid(NO_ENTRY)
    workers = pipelines.workers
    workers.set(process_user=str(NO_ENTRY))
    asks = "id -u; stat -c %u:%g:%a data data/PG_VERSION; psql -X -At -c 'SELECT count(*) FROM fruit'"
    command = {"name": "ask", "command": ["sh", "-ec", asks]}
    async with workers.worker():
        job = await workers.ended(await pipelines.submit(*STEPS, command, connector="postgres"), Status.SUCCEEDED)
        more = {"name": "more", "command": ["sh", "-ec", f"{asks}; true"]}
        again = await workers.ended(await pipelines.submit(*STEPS, more, connector="postgres"), Status.SUCCEEDED)
    owner = f"{NO_ENTRY}:{NO_ENTRY}"
    expected = [str(NO_ENTRY), f"{owner}:700", f"{owner}:600", "1000"]
    assert ((await workers.log(job))[-4:], await workers.log(again)) == (expected, expected)
    assert await pipelines.statuses(again) == ["cached"] * 3 + ["succeeded"]
    assert workers.folders == []


@pytest.mark.skipif(os.geteuid() != 0, reason="about root")
async def test_postgres_as_root_is_refused_with_what_to_do(pipelines: Pipelines) -> None:
    """Proves P8, R17."""
    workers = pipelines.workers
    workers.set(process_user="root")
    async with workers.worker():
        job = await workers.ended(await pipelines.submit(sql("schema"), connector="postgres"), Status.FAILED)
    assert job.error is not None
    assert job.error.message.startswith("Postgres does not run as root: give the job a `user`")
