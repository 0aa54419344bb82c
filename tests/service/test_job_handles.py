"""One vocabulary for jobs: builders, options, handles, on the database and over HTTP, asynchronous and synchronous."""

import asyncio
import io
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pydantic
import pytest

from holdfast import (
    Call,
    Conflict,
    Container,
    Context,
    Holdfast,
    Invalid,
    JobCancelled,
    JobFailed,
    JobPaused,
    NotFound,
    Pipeline,
    Process,
    Retry,
    Status,
    Task,
)
from holdfast.client.options import JobOptions
from holdfast.submission import Submission
from tests.support.in_process_workers import eventually
from tests.support.ways_in import WAYS, Way, way_in

PATIENCE = 120.0
"""Seconds that a result may take on a loaded machine."""


class Order(pydantic.BaseModel):
    customer: str
    due: datetime


@dataclass
class Report:
    order: Order
    lines: list[str]


def application() -> Holdfast:
    app = Holdfast()

    @app.function(lane="{order.customer}", labels={"team": "blue"})
    async def bill(order: Order, ctx: Context, copies: int = 1) -> Report:
        ctx.log(f"billing {order.customer}")
        return Report(order, [f"{order.due:%Y}"] * copies)

    @app.function(name="fails")
    def fails() -> None:
        raise KeyError("no such thing")

    @app.function(name="waits")
    async def waits(ctx: Context) -> str:
        ctx.progress(10, "waiting")
        await ctx.cancel.requested_async()
        raise RuntimeError("stopped")

    app.bill, app.fails, app.waits = bill, fails, waits  # type: ignore[attr-defined]
    return app


@pytest.fixture(params=WAYS)
async def way(request: pytest.FixtureRequest, clean_url: str, tmp_path: Path) -> AsyncIterator[Way]:
    async with way_in(request.param, application(), clean_url, tmp_path) as way:
        yield way


@pytest.fixture
async def working(way: Way) -> AsyncIterator[Way]:
    """The way in, and a worker."""
    async with way.app.worker():
        yield way


async def result(way: Way, job: Any) -> Any:
    return await way(lambda: job.result(timeout=PATIENCE))


async def test_function_takes_and_returns_its_own_types(working: Way) -> None:
    """Proves G1: the result of a handle has the type that the function's annotation says."""
    way, bill = working, working.app.bill  # type: ignore[attr-defined]
    order = Order(customer="ada", due=datetime(2026, 1, 17, 9, tzinfo=UTC))
    job = await way.submit(bill.with_options(priority=5, labels={"team": "red"}), order=order, copies=2)
    assert (job.lane, job.record.priority, job.labels) == ("ada", 5, {"team": "red"})
    assert await result(way, job) == Report(order, ["2026", "2026"])
    assert await way(job.logs) == ["billing ada"]
    by_name = await way.submit(Call("bill", {"order": order}, returns=Report))
    assert (by_name.labels, await result(way, by_name)) == ({"team": "blue"}, Report(order, ["2026"]))
    plain = await way.submit("bill", order=order)
    written = {"order": order.model_dump(mode="json"), "lines": ["2026"]}
    assert await result(way, plain) == (Report(order, ["2026"]) if "database" in way.name else written)


OPTIONS: dict[str, Any] = {
    "id": "01981e6e-0000-7000-8000-000000000001",
    "kind": "report",
    "queue": "heavy",
    "lane": "crm",
    "priority": 3,
    "labels": {"team": "blue"},
    "hold": True,
    "max_attempts": 4,
    "retry": Retry(on=["timed_out"], base=1, cap=2),
    "on_lost": "fail",
    "timeout": 10,
    "queue_timeout": 20,
    "idle_timeout": 30,
    "stop_grace": 1,
    "stop_after": 3,
    "budget": {"tokens": 9},
    "secrets": ["key"],
    "check": {"command": ["true"], "timeout": 5},
    "reuse_key": "k",
    "rebuild": True,
}


async def test_every_option_of_a_submit_reaches_the_job(way: Way) -> None:
    """Proves G1. A field of a submission that no option names fails the first assertion."""
    given = {*OPTIONS, "needs", "available_at"}
    elsewhere = {"runner", "spec", "inputs", "uploads", "tasks", "connector", "snapshot", "base"}
    assert given | elsewhere == {*Submission.__struct_fields__} - {"tenant"}
    assert given | {"delay", "key"} == {*JobOptions.__annotations__}
    first = await way.submit(Process(["true"], hold=True))
    due = datetime.now(UTC) + timedelta(hours=1)
    env, need = {"A": "1"}, [first]
    job = await way.submit(
        Process(["echo", "a"], env=env, stdin="x", memory="1g", inputs={"n": 1}).with_options(
            **OPTIONS, needs=need, available_at=due
        )
    )
    record = (await way(job.refresh)).record
    assert record.spec == {"command": ["echo", "a"], "env": env, "stdin": "x", "memory": "1g"}
    assert (record.inputs, record.available_at, record.status) == ({"n": 1}, due, Status.PENDING)
    for name in ("id", "kind", "queue", "lane", "priority", "labels", "max_attempts", "reuse_key"):
        assert getattr(record, name) == OPTIONS[name], name
    policy = record.policy
    for name in ("on_lost", "timeout", "queue_timeout", "idle_timeout", "stop_grace", "stop_after", "budget"):
        assert getattr(policy, name) == OPTIONS[name], name
    assert (policy.retry.on, policy.retry.base, policy.retry.cap) == (("timed_out",), 1, 2)
    assert (policy.secrets, policy.check and policy.check.command) == (("key",), ("true",))
    again = await way.submit(Process(["echo"], reuse_key="k"))
    assert (again.id, again.reused) == (job.id, True)
    delayed = await way.submit(Process(["true"], delay=3600))
    assert delayed.record.available_at > datetime.now(UTC) + timedelta(minutes=50)


async def test_builders_describe_containers_and_pipelines(way: Way) -> None:
    """Proves G1. Plain fields are accepted beside them."""
    jobs = await way.submit_many(
        [
            Container("report:1", ["run"], memory="1g", cpus=2.0, network="none", hold=True),
            Pipeline([Task("a", ["true"], env={"X": "1"}), Task("b", ["true"], timeout=5)], hold=True),
            {"runner": "function", "spec": {"name": "fails"}, "hold": True},
        ]
    )
    specs = [(await way(job.refresh)).record.spec for job in jobs]
    assert specs[0] == {"image": "report:1", "command": ["run"], "memory": "1g", "cpus": 2.0, "network": "none"}
    tasks = [{"name": "a", "command": ["true"], "env": {"X": "1"}}, {"name": "b", "command": ["true"], "timeout": 5}]
    assert specs[1] == {"tasks": tasks}
    assert specs[2] == {"name": "fails"}
    assert len({job.id for job in jobs}) == 3


async def test_builders_of_one_call_need_each_other(working: Way) -> None:
    """Proves G1."""
    way, bill = working, working.app.bill  # type: ignore[attr-defined]
    build = Process(["sh", "-c", "echo built"])
    order = Order(customer="ada", due=datetime(2026, 1, 17, tzinfo=UTC))
    run, made = await way.submit_many([bill.with_options(needs=[build]).call(order=order), build])
    assert isinstance(await result(way, run), Report)
    assert (await way(made.refresh)).status is Status.SUCCEEDED
    for needs in ([made.id], [made], [run, made.id]):
        job = await way.submit(Process(["true"], needs=needs))
        assert await result(way, job) is None


async def test_files_are_paths_open_files_or_bytes(working: Way, tmp_path: Path) -> None:
    """Proves G1. What a job leaves is listed, read and downloaded."""
    way = working
    path = tmp_path / "one.txt"
    path.write_text("one\n")
    script = "cat input/one.txt input/sub/two.txt input/three.txt > output/all.txt"
    files: dict[str, Any] = {"one.txt": path, "sub/two.txt": b"two\n", "three.txt": io.BytesIO(b"three\n")}
    job = await way.submit(Process(["sh", "-c", script], files=files))
    await result(way, job)
    assert [(file.path, file.size) for file in await way(job.artifacts)] == [("all.txt", 14)]
    assert await way(lambda: job.read("all.txt")) == b"one\ntwo\nthree\n"
    await way(lambda: job.download("all.txt", tmp_path / "copy.txt"))
    assert (tmp_path / "copy.txt").read_text() == "one\ntwo\nthree\n"
    with path.open("rb") as file:
        named = await way.submit(Process(["cat", "input/one.txt"], files=[file]))
    await result(way, named)
    assert await way(named.logs) == ["one"]
    with pytest.raises(NotFound):
        await way(lambda: job.read("none.txt"))
    with pytest.raises(Invalid, match=r"none\.txt cannot be read"):
        await way.submit(Process(["true"], files=[tmp_path / "none.txt"]))


async def test_waiting_job_is_explained_released_and_cancelled(way: Way) -> None:
    """Proves G1."""
    held = await way.submit(Process(["true"], hold=True))
    assert held.status is Status.PENDING
    assert "release" in str(await way(held.explain))
    assert (await way(held.release)).status is Status.QUEUED
    with pytest.raises(TimeoutError):
        await way(lambda: held.wait(timeout=0.05))
    assert (await way(lambda: held.cancel(reason="enough"))).status is Status.CANCELLED
    with pytest.raises(JobCancelled, match="enough") as caught:
        await result(way, held)
    assert (caught.value.job_id, caught.value.error_code) == (held.id, "cancelled")
    assert (await way(held.resume)).status is Status.QUEUED
    outcome = await way(lambda: held.delete(force=True))
    assert outcome == ("deleting" if "database" in way.name else "deleted"), "a duty removes what this process cannot"


async def test_running_job_is_interrupted_and_resolved(working: Way) -> None:
    """Proves G1: a paused job has no result until a person gives one."""
    way = working
    job = await way.submit("waits")
    following = asyncio.create_task(way(job.follow))

    async def has_progress() -> bool:
        return (await way(job.refresh)).progress is not None

    await eventually(has_progress)
    assert job.progress == {"percent": 10, "message": "waiting"}
    await way(lambda: job.interrupt(reason="look at it"))
    with pytest.raises(JobPaused):
        await result(way, job)
    await way(lambda: job.resolve({"ok": True}))
    assert await result(way, job) == {"ok": True}
    seqs = [event.seq for event in await following]
    assert seqs == list(range(1, job.record.last_seq + 1))
    assert len(await way(job.attempts)) == 1


async def test_failed_job_blocks_its_lane_until_it_is_dismissed(working: Way) -> None:
    """Proves G1."""
    way = working
    failed, second = await way.submit_many([Call("fails", lane="L"), Process(["true"], lane="L")])
    with pytest.raises(JobFailed, match="KeyError: 'no such thing'"):
        await result(way, failed)
    assert (await way(second.refresh)).status is Status.QUEUED
    await way(lambda: failed.dismiss(reason="known"))
    assert await result(way, second) is None


async def test_errors_are_the_same_classes_on_every_way(way: Way) -> None:
    """Proves G1."""
    missing = way.api.job("01981e6e-0000-7000-8000-00000000dead")
    for call in (missing.refresh, missing.cancel, missing.wait, missing.follow, missing.explain):
        with pytest.raises(NotFound):
            await way(call)
    with pytest.raises(Invalid, match="priority") as caught:
        await way.submit(Process(["true"], priority=10**9))
    assert caught.value.field == "priority"
    job = await way.submit(Process(["true"]))
    with pytest.raises(Conflict, match="cannot release"):
        await way(job.release)
    with pytest.raises(Invalid, match="was not read yet"):
        _ = way.api.job(job.id).status
    assert way.api.job(job.id) == job


async def test_mistakes_are_refused_before_anything_is_submitted(way: Way) -> None:
    """Proves G1."""
    job = await way.submit(Process(["true"], hold=True))
    bill = way.app.bill  # type: ignore[attr-defined]
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (Process(["true"], needs={"build": job}), {}, "needs: have names"),
        (Process(["true"], needs=[Process(["true"])]), {}, "not in this call"),
        (Process(["true"]), {"priority": 3}, "with_options"),
        ({"runner": "process", "spec": {}}, {"queue": "q"}, "with_options"),
        (bill, {"customer": "ada"}, "do not fit function bill"),
        (bill, {"order": {"customer": "ada"}}, "order: due: Field required"),
        (object(), {}, "not a builder"),
    ]
    for thing, named, message in wrong:
        with pytest.raises(Invalid, match=message):
            await way.submit(thing, **named)
    for make, message in (
        (lambda: Process("echo a"), "is one text"),
        (lambda: Process(["a"], colour="red"), "colour: is not an option"),  # type: ignore[call-arg]
        (lambda: Process(["a"], delay=1, available_at=datetime.now(UTC)), "give one of them"),
    ):
        with pytest.raises(Invalid, match=message):
            make()  # type: ignore[no-untyped-call]
    with pytest.raises(Invalid, match="exceptions are for the decorator"):
        await way.submit(Process(["true"], retry=Retry(exceptions=(OSError,))))
    with pytest.raises(Invalid, match=r"jobs\[0\]\.key"):
        await way.submit_many([Process(["true"], key="k")])
    found, _ = await way(way.api.jobs)
    assert [one.id for one in found] == [job.id]


async def test_idempotency_key_returns_the_first_job(way: Way) -> None:
    """Proves G1."""
    first = await way.submit(Process(["true"], key="k1"))
    assert (await way.submit(Process(["true"], key="k1"))).id == first.id
    assert (await way.submit({"runner": "process", "spec": {"command": ["true"]}}, key="k1")).id == first.id
    many = await way.submit_many([Process(["true"])] * 2, key="k2")
    assert await way.submit_many([Process(["true"])] * 2, key="k2") == many
