"""The options of a function's decorator: retries by exception, `ctx.retry`, logging, types, lanes from inputs."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import Context, Holdfast
from holdfast.errors import ConfigError, Invalid
from holdfast.model import NewEvent, Status
from holdfast.runner.function import FunctionRegistry
from holdfast.worker.function_logs import FunctionLogHandler, logs_to
from tests.support.in_process_workers import InProcessWorkers
from tests.support.service import service_in_process
from tests.support.store_harness import StoreHarness
from tests.worker.test_function_defaults import PLAY, WAYS, registered, submitted

log = logging.getLogger("tests.shop")
QUICK = {"on": ["failed"], "base": 0.01, "cap": 0.02}


class Point(msgspec.Struct):
    x: int


ALL: dict[str, Any] = {
    "queue": "desktop",
    "lane": "target-{target}",
    "priority": 4,
    "labels": {"team": "blue"},
    "max_attempts": 3,
    "retry": {"on": ["timed_out"], "base": 1, "cap": 2},
    "on_lost": "fail",
    "timeout": 7,
    "queue_timeout": 8,
    "idle_timeout": 9,
    "stop_grace": 1,
    "stop_after": 30,
    "budget": {"tokens": 5},
    "secrets": ["key"],
}


@pytest.mark.parametrize(("kind", "way"), [*[one for one in WAYS if one[1] != "app"], ("postgres", "sql")])
async def test_every_default_of_a_function_holds_for_every_way(harness: StoreHarness, way: str, tmp_path: Path) -> None:
    """Proves G2. A template is filled from the inputs; what the submit says wins, also a built-in value."""
    await registered(harness, **ALL)
    job = await submitted(harness, way, {**PLAY, "inputs": {"target": "crm"}}, tmp_path)
    assert (job.queue, job.lane, job.priority, job.labels, job.max_attempts) == (
        *("desktop", "target-crm", 4, {"team": "blue"}, 3),
    )
    policy = job.policy
    assert (policy.retry.on, policy.retry.base, policy.retry.cap) == (("timed_out",), 1, 2)
    assert (policy.on_lost, policy.timeout, policy.queue_timeout, policy.idle_timeout) == ("fail", 7, 8, 9)
    assert (policy.stop_grace, policy.stop_after, policy.budget, policy.secrets) == (1, 30, {"tokens": 5}, ("key",))
    said = {"lane": "mine", "priority": 0, "on_lost": "requeue", "max_attempts": 1, "labels": {"a": "b"}}
    own = await submitted(harness, way, {**PLAY, **said}, tmp_path)
    assert (own.lane, own.priority, own.policy.on_lost) == ("mine", 0, "requeue")
    assert (own.max_attempts, own.labels) == (1, {"a": "b"})


@pytest.mark.parametrize(
    ("template", "inputs", "lane"),
    [
        ("{target}", {"target": "crm"}, "crm"),
        ("{order.customer}/{n}", {"order": {"customer": "ada"}, "n": 7}, "ada/7"),
        ("{target}", {"target": "{n}", "n": 1}, "{n}"),
        ("{target}", {}, None),
        ("{target}", {"target": None}, None),
        ("{target}", {"target": True}, None),
        ("{target}", {"target": 1.5}, None),
        ("{target}", {"target": ["a"]}, None),
        ("{target}", {"target": ""}, None),
        ("{target}", {"target": "x" * 201}, None),
        ("{target}", {"target": "a\nb"}, None),
        ("{order.customer}", {"order": "ada"}, None),
    ],
)
async def test_lane_of_a_function_comes_from_its_inputs(
    harness: StoreHarness, template: str, inputs: dict[str, Any], lane: str | None
) -> None:
    """Proves G2: the same on both databases, one by one and in bulk."""
    await registered(harness, lane=template)
    job = {**PLAY, "inputs": inputs}
    if lane is None:
        for submit in (harness.store.jobs.submit(job), harness.store.jobs.submit_many([job])):
            with pytest.raises(Invalid, match="of function play") as caught:
                await submit
            assert caught.value.field == "lane"
        return
    assert (await harness.store.jobs.submit(job)).lane == lane
    ids = await harness.store.jobs.submit_many([job, job])
    assert [(await harness.get(job_id)).lane for job_id in ids] == [lane, lane]
    assert [lease.lane for lease in await harness.claim(name="play")] == [lane]


async def test_higher_revision_holds_the_callers_own_or_the_registered(harness: StoreHarness) -> None:
    """Proves G2: of two releases at once, the whole of the newer defaults applies, and nothing of the older."""
    await registered(harness, 1, queue="registered", timeout=5)
    for revision, expected in ((0, ("registered", 5)), (1, ("registered", 5)), (2, ("own", None))):
        app = Holdfast(harness.url)
        app.function(name="play", queue="own", revision=revision)(lambda: None)
        async with app:
            one = (await app.submit("play")).record
            (many,) = await app.submit_many([app_call(app)])
            await many.refresh()
        assert (one.queue, one.policy.timeout) == expected
        assert (many.queue, many.record.policy.timeout) == expected
    await registered(harness, 3)
    async with app:
        assert (await app.submit("play")).queue == "default"


def app_call(app: Holdfast) -> Any:
    return app._function_named("play", {})


def test_defaults_that_no_submit_could_use_are_refused_by_the_decorator() -> None:
    functions = FunctionRegistry()

    def play(target: str, times: int = 1) -> None: ...

    wrong: list[tuple[dict[str, Any], str]] = [
        ({"lane": "{missing}"}, "names missing, which is not an input"),
        ({"lane": "{times}"}, "names times, which is not an input that every job must have"),
        ({"lane": "{target"}, "is not a template"),
        ({"lane": "{}"}, "is not a template"),
        ({"priority": "high"}, "priority: Expected `int`"),
        ({"retry": {"base": 9, "cap": 1}}, "retry: base 9"),
        ({"colour": "red"}, "colour: is not a default"),
        ({"revision": -1}, "revision is -1"),
    ]
    for options, message in wrong:
        with pytest.raises(ConfigError, match=message):
            functions.add(name="play", **options)(play)
    assert functions.names == []


async def test_only_named_exceptions_are_retried(workers: InProcessWorkers) -> None:
    @workers.functions.add(max_attempts=3, retry=QUICK, exceptions=(ConnectionError, KeyError))
    def flaky(ctx: Context, known: bool) -> int:
        if ctx.attempt < 3:
            raise ConnectionResetError("gone") if known else ValueError("never mind")
        return ctx.attempt

    async with workers.worker() as worker:
        await worker.started.wait()
        retried = await workers.ended(await workers.submit("flaky", inputs={"known": True}), Status.SUCCEEDED)
        failed = await workers.ended(await workers.submit("flaky", inputs={"known": False}), Status.FAILED)
    assert (retried.result, failed.attempts) == (3, 1)
    assert failed.error is not None
    assert failed.error.message == "ValueError: never mind"


async def test_function_asks_for_a_retry_whatever_its_retry_is_for(workers: InProcessWorkers) -> None:
    """It passes `except Exception`, counts as an attempt, and fails the job when none is left."""

    @workers.functions.add(retry={"on": [], "base": 3600, "cap": 3600})
    async def later(ctx: Context, enough: int) -> int:
        try:
            if ctx.attempt < enough:
                ctx.retry(after=0.01, reason="not yet")
        except Exception as error:
            raise AssertionError("a retry is no exception") from error
        return ctx.attempt

    @workers.functions.add
    def never(ctx: Context) -> None:
        ctx.retry(after=-1)

    async with workers.worker() as worker:
        await worker.started.wait()
        asked = await workers.submit("later", inputs={"enough": 3}, max_attempts=3)
        done = await workers.ended(asked, Status.SUCCEEDED)
        spent = await workers.ended(await workers.submit("later", inputs={"enough": 2}), Status.FAILED)
        refused = await workers.ended(await workers.submit("never"), Status.FAILED)
    assert (done.result, done.attempts) == (3, 3)
    attempts = await workers.store.attempts.list(asked.id)
    assert [one.error and one.error.message for one in attempts] == ["not yet", "not yet", None]
    assert spent.error is not None
    assert (spent.error.code, spent.error.message) == ("function_error", "not yet")
    assert refused.error is not None
    assert "after: -1" in refused.error.message


async def test_what_a_function_logs_is_in_its_jobs_log(workers: InProcessWorkers) -> None:
    """From the loop, a thread and a task of the function; each job has its own, and `capture_logs=False` none."""

    async def beside(name: str) -> None:
        log.warning("task of %s", name)

    @workers.functions.add
    async def talks(name: str) -> None:
        log.warning("hello %s", name)
        await asyncio.create_task(beside(name))
        try:
            raise ValueError("odd")
        except ValueError:
            log.exception("caught")

    @workers.functions.add
    def threaded() -> None:
        log.error("in %s", threading.current_thread().name.rpartition("_")[0])
        logging.getLogger("holdfast.worker").error("not the function's own")

    @workers.functions.add(capture_logs=False)
    def silent() -> None:
        log.warning("nothing")

    async with workers.worker():
        jobs = [await workers.submit("talks", inputs={"name": name}) for name in ("ada", "bob")]
        for job in jobs:
            await workers.ended(job, Status.SUCCEEDED)
        others = [await workers.submit("threaded"), await workers.submit("silent")]
        for job in others:
            await workers.ended(job, Status.SUCCEEDED)
    for job, name in zip(jobs, ("ada", "bob"), strict=True):
        lines = await workers.log(job, "stderr")
        assert lines[:3] == [f"WARNING tests.shop: {said} {name}" for said in ("hello", "task of")] + [
            "ERROR tests.shop: caught"
        ]
        assert lines[-1] == "ValueError: odd"
    assert await workers.log(others[0], "stderr") == ["ERROR tests.shop: in holdfast-function"]
    assert await workers.log(others[1], "stderr") == []
    assert not any(type(one).__name__ == "FunctionLogHandler" for one in logging.getLogger().handlers)


def test_record_whose_arguments_do_not_fit_is_logged_all_the_same() -> None:
    emitted: list[NewEvent] = []
    with logs_to(emitted.append):
        FunctionLogHandler().emit(logging.LogRecord("shop", logging.ERROR, "", 1, "%d rows", ("no",), None))
    (line,) = emitted[0].data["lines"]
    assert line.startswith("ERROR shop: %d rows (TypeError")


async def test_typed_inputs_that_do_not_fit_fail_the_job_at_once(workers: InProcessWorkers) -> None:
    @workers.functions.add(max_attempts=3, retry=QUICK)
    def move(point: Point, tags: set[str]) -> list[Any]:
        return [Point(point.x + 1), tags]

    @workers.functions.add
    def odd() -> object:
        return object()

    async with workers.worker():
        good = await workers.submit("move", inputs={"point": {"x": 1}, "tags": ["a", "a"]})
        bad = await workers.submit("move", inputs={"point": {"x": "1"}, "tags": []})
        unwritable = await workers.submit("odd")
        assert (await workers.ended(good, Status.SUCCEEDED)).result == [{"x": 2}, ["a"]]
        failed = await workers.ended(bad, Status.FAILED)
        strange = await workers.ended(unwritable, Status.FAILED)
    assert failed.error is not None
    assert (failed.error.code, failed.attempts) == ("contract_violation", 1)
    assert "point: Expected `int`, got `str`" in failed.error.message
    assert strange.error is not None
    assert "cannot be written as JSON" in strange.error.message


async def test_lane_that_cannot_be_filled_is_422(harness: StoreHarness, tmp_path: Path) -> None:
    await registered(harness, lane="{target}")
    async with service_in_process(harness.url, tmp_path / "data") as service, service.client() as client:
        answer = await client.post("/v1/jobs", json=PLAY)
    assert answer.status_code == 422
    assert answer.json()["error"]["details"] == {"field": "lane"}
