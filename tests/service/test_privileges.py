"""Privileged fields of a job: who may use them, by every way of submitting, and who may be root."""

import asyncio
import io
import os
import sys
import tarfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from holdfast.client.app import Holdfast
from holdfast.errors import ConfigError
from holdfast.model import Role, Status
from holdfast.privileges import PRIVILEGED, names_root
from holdfast.registry import runners
from tests.service.test_direct import direct
from tests.support.docker_engine import DockerEngine
from tests.support.docker_engine import image as busybox
from tests.support.in_process_workers import InProcessWorkers
from tests.support.service import Service, error_of, service_in_process
from tests.support.supervisor_harness import needs_root

PROCESS: dict[str, Any] = {"runner": "process", "spec": {"command": ["true"]}}
DOCKER: dict[str, Any] = {"runner": "docker", "spec": {"image": "a"}}
TASKS = [{"name": "a", "command": ["true"]}]
MORE: list[tuple[dict[str, Any], str, Any]] = [
    (PROCESS, "user", "65532"),
    (DOCKER, "user", "65532"),
    (DOCKER, "user", "worker"),
    (DOCKER, "network", "bridge"),
    (DOCKER, "network", "host"),
    (DOCKER, "network", "container:other"),
    (DOCKER, "memory", "2g"),
    (DOCKER, "memory", "1073741825"),
    (DOCKER, "memory", "0"),
    (DOCKER, "memory", "0k"),
    (DOCKER, "cpus", 1.5),
    (DOCKER, "pids", 257),
    ({**PROCESS, "spec": {}, "tasks": TASKS}, "user", "65532"),
    ({**DOCKER, "tasks": TASKS}, "network", "bridge"),
    ({**DOCKER, "tasks": TASKS}, "memory", "2g"),
]
NO_MORE: list[tuple[dict[str, Any], str, Any]] = [
    (PROCESS, "env", {"A": "1"}),
    (PROCESS, "stdin", "x"),
    (PROCESS, "user", None),
    (DOCKER, "network", "none"),
    (DOCKER, "network", None),
    (DOCKER, "memory", "1g"),
    (DOCKER, "memory", "64m"),
    (DOCKER, "cpus", 1),
    (DOCKER, "pids", 256),
]
ROOTS = ["0", "root", "0:0", "00", "000:5", "12345:0", "12345:root", "+0", "-0", "0x0", " 0", "٠"]
TOOLS = """
[tools.big]
runner = "docker"
image = "a"
user = "1000"
memory = "8g"
cpus = 8
pids = 4096
network = "bridge"

[tools.other]
runner = "process"
command = ["true"]
user = "1000"
"""


def having(job: dict[str, Any], field: str, value: Any) -> dict[str, Any]:
    return {**job, "spec": {**job["spec"], field: value}}


@asynccontextmanager
async def raw_for_all(url: str, folder: Path, **settings: Any) -> AsyncIterator[Service]:
    """A server that lets every submitter give commands and images of their own."""
    async with service_in_process(url, folder / "data", allow_raw=True, docker_host=None, **settings) as service:
        yield service


def refused_field(answer: httpx.Response) -> str:
    assert (answer.status_code, error_of(answer)["code"]) == (403, "field_forbidden"), answer.text
    return str(error_of(answer)["details"]["field"])


def test_every_field_of_every_spec_is_decided() -> None:
    """A new field must say whether it gives a job more than the default. Proves I1."""
    for runner in runners().values():
        for field in runner.fields:
            assert (field in runner.open_fields) is not (field in PRIVILEGED), (runner.name, field)


async def test_privileged_fields_are_for_admins(clean_url: str, tmp_path: Path) -> None:
    """Over the roles; alone, in a bulk, and as a plan. Proves I1, O8."""
    async with raw_for_all(clean_url, tmp_path) as service:
        for role in Role:
            async with service.client(await service.token(role)) as client:
                for base, field, value in MORE:
                    job = having(base, field, value)
                    alone = await client.post("/v1/jobs", json=job)
                    bulk = await client.post("/v1/jobs/bulk", json={"jobs": [PROCESS, job]})
                    if role is Role.ADMIN:
                        assert (alone.status_code, bulk.status_code) == (201, 201), (alone.text, bulk.text)
                    elif role is Role.VIEWER:
                        assert (alone.status_code, bulk.status_code) == (403, 403)
                    else:
                        assert refused_field(alone) == f"spec.{field}"
                        assert refused_field(bulk) == f"jobs[1].spec.{field}"
                        assert "an admin's token, or a tool" in alone.text
                        assert refused_field(await client.post("/v1/jobs", json={**job, "plan_only": True}))


async def test_unprivileged_fields_are_open_to_every_submitter(clean_url: str, tmp_path: Path) -> None:
    """Proves O8."""
    async with (
        raw_for_all(clean_url, tmp_path) as service,
        service.client(await service.token(Role.SUBMITTER)) as client,
    ):
        for job in NO_MORE:
            assert (await client.post("/v1/jobs", json=having(*job))).status_code == 201, job


async def test_malformed_values_are_no_way_around(clean_url: str, tmp_path: Path) -> None:
    """Proves I1."""
    odd: list[tuple[str, Any]] = [
        ("memory", 0), ("memory", "2G "), ("memory", ["2g"]), ("cpus", "8"), ("cpus", True), ("cpus", -1),
        ("pids", 1e9), ("pids", "9"), ("network", ["host"]), ("network", ""), ("user", 0), ("user", ["0"]),
    ]  # fmt: skip
    async with (
        raw_for_all(clean_url, tmp_path) as service,
        service.client(await service.token(Role.SUBMITTER)) as client,
    ):
        for field, value in odd:
            answer = await client.post("/v1/jobs", json=having(DOCKER, field, value))
            assert answer.status_code in (403, 422), (field, value, answer.text)
        for body in ({"runner": ["docker"], "spec": {"user": "0"}}, {"runner": "docker", "spec": ["user"]}):
            assert (await client.post("/v1/jobs", json=body)).status_code in (403, 422)


async def test_the_ceilings_are_settings(clean_url: str, tmp_path: Path) -> None:
    """Proves I1."""
    ceilings = {"docker_memory_max": "4g", "docker_cpus_max": 2.0, "docker_pids_max": 1000}
    async with (
        raw_for_all(clean_url, tmp_path, **ceilings) as service,
        service.client(await service.token(Role.SUBMITTER)) as client,
    ):
        for field, most, more in (("memory", "4g", "5g"), ("cpus", 2, 2.01), ("pids", 1000, 1001)):
            assert (await client.post("/v1/jobs", json=having(DOCKER, field, most))).status_code == 201
            assert refused_field(await client.post("/v1/jobs", json=having(DOCKER, field, more))) == f"spec.{field}"


async def test_limits_of_processes_have_the_same_ceilings(clean_url: str, tmp_path: Path) -> None:
    """The default, where no higher one is set; where there is no limit, a job can only ask for less. Proves I1."""
    limits: dict[str, Any] = {"process_memory": 2**30, "process_pids": 100, "process_pids_max": 200}
    limits |= {"file_size": 2**20, "folder_size": None}
    asked = [("memory", "1g", "2g"), ("pids", 200, 201), ("file_size", "1m", "2m"), ("folder_size", "900g", "0")]
    async with (
        raw_for_all(clean_url, tmp_path, **limits) as service,
        service.client(await service.token(Role.SUBMITTER)) as client,
    ):
        for field, most, more in asked:
            made = await client.post("/v1/jobs", json=having(PROCESS, field, most))
            assert made.status_code == 201, (field, made.text)
            assert refused_field(await client.post("/v1/jobs", json=having(PROCESS, field, more))) == f"spec.{field}"


async def test_tools_may_use_privileged_fields(clean_url: str, tmp_path: Path) -> None:
    """The operator wrote them, and callers cannot change them. Proves I1, O8."""
    (tmp_path / "tools.toml").write_text(TOOLS)
    async with (
        raw_for_all(clean_url, tmp_path, tools=tmp_path / "tools.toml") as service,
        service.client(await service.token(Role.SUBMITTER)) as client,
    ):
        for tool in ("big", "other"):
            made = await client.post("/v1/jobs", json={"tool": tool})
            assert (made.status_code, made.json()["spec"]["user"]) == (201, "1000")
            assert (await client.post("/v1/jobs", json={"tool": tool, "spec": {"user": "0"}})).status_code == 422


async def test_root_needs_a_setting_also_for_admins_and_tools(clean_url: str, tmp_path: Path) -> None:
    """Proves I1."""
    assert all(map(names_root, ROOTS))
    async with raw_for_all(clean_url, tmp_path) as service, service.client() as admin:
        for user in ROOTS:
            for job in (PROCESS, DOCKER, {**PROCESS, "spec": {}, "tasks": TASKS}):
                answer = await admin.post("/v1/jobs", json=having(job, "user", user))
                assert refused_field(answer) == "spec.user"
                assert "HOLDFAST_ALLOW_ROOT_JOBS" in answer.text
    (tmp_path / "tools.toml").write_text('[tools.a]\nrunner = "process"\ncommand = ["true"]\nuser = "0"\n')
    with pytest.raises(ConfigError, match=r"tool a .*HOLDFAST_ALLOW_ROOT_JOBS"):
        async with raw_for_all(clean_url, tmp_path, tools=tmp_path / "tools.toml"):
            pass
    async with (
        raw_for_all(clean_url, tmp_path, tools=tmp_path / "tools.toml", allow_root_jobs=True) as service,
        service.client() as admin,
    ):
        assert (await admin.post("/v1/jobs", json=having(PROCESS, "user", "0"))).status_code == 201
        assert (await admin.post("/v1/jobs", json={"tool": "a"})).status_code == 201
        async with service.client(await service.token(Role.OPERATOR)) as client:
            assert refused_field(await client.post("/v1/jobs", json=having(PROCESS, "user", "0"))) == "spec.user"


async def test_direct_mode_refuses_privileged_fields(workers: InProcessWorkers) -> None:
    """Proves I1."""
    async with direct(workers, allow_raw=True) as service:
        async with service.client(await service.token(Role.SUBMITTER)) as client:
            assert refused_field(await client.post("/v1/jobs", json=having(PROCESS, "user", "65532"))) == "spec.user"
            assert (await client.post("/v1/jobs", json=PROCESS)).json()["status"] == "succeeded"
        async with service.client() as admin:
            assert refused_field(await admin.post("/v1/jobs", json=having(PROCESS, "user", "0"))) == "spec.user"


async def test_the_command_line_says_which_field_is_refused(clean_url: str, tmp_path: Path) -> None:
    """Proves I1, O7."""
    (tmp_path / "job.json").write_text('{"runner": "process", "spec": {"command": ["true"], "user": "65532"}}')
    async with raw_for_all(clean_url, tmp_path) as service:
        for role, code in ((Role.SUBMITTER, 4), (Role.OPERATOR, 4), (Role.VIEWER, 4), (Role.ADMIN, 0)):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "holdfast.cli.main", "submit", "--file", str(tmp_path / "job.json")),
                env={**os.environ, "HOLDFAST_URL": service.url, "HOLDFAST_TOKEN": await service.token(role)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            _, said = await process.communicate()
            assert process.returncode == code, said.decode()
            assert (b"spec.user: chooses whom the job runs as" in said) is (role in (Role.SUBMITTER, Role.OPERATOR))


@needs_root
async def test_a_program_with_the_database_is_trusted_but_root_is_refused_by_the_worker(
    workers: InProcessWorkers,
) -> None:
    """Proves I1."""
    async with Holdfast(workers.settings.url) as app:
        other = await app.store.jobs.submit({"runner": "process", "spec": {"command": ["id", "-u"], "user": "12345"}})
        roots = [
            await app.store.jobs.submit(
                {"runner": "process", "spec": {"command": ["id"], "user": user}, "max_attempts": 3}
            )
            for user in ("0", "root", "0:5", "12345:0")
        ]
    for parent in [workers.settings.state.parent, *workers.settings.state.parent.parents]:
        if parent != Path("/") and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    async with workers.worker():
        await workers.ended(other, Status.SUCCEEDED)
        for job in roots:
            failed = await workers.ended(job, Status.FAILED)
            assert failed.error is not None
            assert (failed.error.code, failed.attempt) == ("root_refused", 1)
            assert "HOLDFAST_ALLOW_ROOT_JOBS" in failed.error.message
    assert await workers.log(other) == ["12345"]
    workers.set(allow_root_jobs=True)
    allowed = await workers.command("id", "-u", spec={"user": "0"})
    async with workers.worker():
        await workers.ended(allowed, Status.SUCCEEDED)
    assert await workers.log(allowed) == ["0"]


@needs_root
async def test_a_check_is_not_run_as_root_either(workers: InProcessWorkers, tmp_path: Path) -> None:
    """Proves I1."""
    check = {"command": ["touch", str(tmp_path / "ran")], "timeout": 60}
    job = await workers.sh("true", spec={"user": "root"}, check=check)
    async with workers.worker():
        failed = await workers.ended(job, Status.FAILED)
    assert failed.error is not None
    assert failed.error.code == "root_refused"
    assert not (tmp_path / "ran").exists()


async def test_root_of_an_image_is_refused_by_the_worker(workers: InProcessWorkers, docker: DockerEngine) -> None:
    """By number, by a name of the image, by its group, and by the group that the image puts it into. Proves I1."""
    docker.docker("import", "-", "holdfast-roots:1", stdin=with_users())
    users = ("0", "12345:0", "toor", "ingroup", "member", "oddly")
    jobs = [await workers.container("id", spec={"image": "holdfast-roots:1", "user": user}) for user in users]
    fine = await workers.container("id -u; id -G", spec={"image": "holdfast-roots:1", "user": "plain"})
    async with workers.worker():
        for job in jobs:
            failed = await workers.ended(job, Status.FAILED)
            assert failed.error is not None
            assert (failed.error.code, failed.attempt) == ("root_refused", 1), (job.spec, failed.error)
        await workers.ended(fine, Status.SUCCEEDED)
    assert await workers.log(fine) == ["4000", "4000"]


async def test_users_of_an_image_that_cannot_be_looked_up_fail_the_start(
    workers: InProcessWorkers, docker: DockerEngine
) -> None:
    """A list of groups that is a symbolic link is not read. Proves I1."""
    docker.docker("import", "-", "holdfast-linked:1", stdin=with_users(linked=True))
    job = await workers.container("id", spec={"image": "holdfast-linked:1", "user": "plain"})
    number = await workers.container("id -u", spec={"image": "holdfast-linked:1", "user": "4000"})
    async with workers.worker():
        failed = await workers.ended(job, Status.FAILED)
        await workers.ended(number, Status.SUCCEEDED)
    assert failed.error is not None
    assert (failed.error.code, failed.attempt) == ("start_failed", 1)
    assert "/etc/group of the image is not a regular file" in failed.error.message


def with_users(*, linked: bool = False) -> bytes:
    """The tests' image with other users and groups."""
    passwd = b"toor:x:0:5::/:/\ningroup:x:4001:0::/:/\nmember:x:4002:4002::/:/\nplain:x:4000:4000::/:/\n"
    passwd += b"oddly:x:4003:4003::/:/\n"
    group = b"root:x:0:other,member\nalso:x:+00:oddly\nplain:x:4000:\n"
    made = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(busybox())) as old, tarfile.open(fileobj=made, mode="w") as new:
        for entry in old:
            if entry.name not in ("etc/passwd", "etc/group"):
                new.addfile(entry, old.extractfile(entry) if entry.isreg() else None)
        for name, data in (("etc/passwd", passwd), ("etc/group", group)):
            about = tarfile.TarInfo(name)
            about.size = len(data)
            about.mode = 0o644
            if linked and name == "etc/group":
                about.size, about.type, about.linkname = 0, tarfile.SYMTYPE, "groups"
            new.addfile(about, io.BytesIO(data))
    return made.getvalue()
