"""What a type checker says about the Python API: `make check` reads this file, nothing runs it."""

from typing import Any, assert_type

from holdfast import (
    AsyncClient,
    Call,
    Client,
    Container,
    Context,
    Function,
    Holdfast,
    Job,
    Pipeline,
    Process,
    Retry,
    Status,
    SyncJob,
    Task,
)


class Report:
    pages: int


app = Holdfast("postgresql:///jobs")


@app.function(
    queue="desktop", lane="{target}", max_attempts=3, retry=Retry(on=["failed"]), on_lost="requeue", timeout=600
)
async def play(target: str, steps: list[str], ctx: Context) -> Report:
    return Report()


@app.function()
def count(rows: int) -> int:
    return rows


async def on_the_database(build: Job[Any]) -> None:
    job = await app.submit(play, target="crm", steps=[])
    assert_type(job, Job[Report])
    assert_type(await job.result(timeout=60), Report)
    assert_type((await job.cancel(reason="enough")).status, Status)
    assert_type(await app.submit(play.with_options(priority=5, needs=[build], delay=30), target="crm"), Job[Report])
    assert_type(await app.submit(count, rows=1), Job[int])
    assert_type(await app.submit(count.call(rows=1)), Job[int])
    assert_type(await app.submit(Call("count", {"rows": 1}, returns=int)), Job[int])
    assert_type(await app.submit(Process(["make"], needs=[job, "id", build])), Job[Any])
    assert_type(await app.submit({"runner": "process", "spec": {"command": ["make"]}}, key="k"), Job[Any])
    assert_type(await app.submit("count", rows=1), Job[Any])
    await app.submit_many([Process(["make"]), Container("report:1", memory="1g"), count.call(rows=1), {"runner": "x"}])
    await app.submit(Pipeline([Task("a", ["true"])], base=None, connector="files"))
    async for event in job.follow():
        assert_type(event.seq, int)
    async with app.worker(queues={"desktop": 4}):
        pass
    assert_type(await play("crm", [], _context()), Report)
    assert_type(count(1), int)


async def over_http(client: AsyncClient) -> None:
    job = await client.submit(play, target="crm", steps=[])
    assert_type(job, Job[Report])
    assert_type(await client.submit(Process(["wc"], files={"a": b"", "b": "path"})), Job[Any])


def synchronously(client: Client, function: Function[..., Any, Report]) -> None:
    with app.sync() as jobs, app.worker():
        job = jobs.submit(play, target="crm", steps=[])
        assert_type(job, SyncJob[Report])
        assert_type(job.result(timeout=60), Report)
        assert_type(job.wait(timeout=1), SyncJob[Report])
        assert_type(job.logs(), list[str])
        job.cancel(reason="enough").refresh()
        for event in job.follow(after=3):
            assert_type(event.type, str)
    assert_type(client.submit(function), SyncJob[Report])
    assert_type(client.submit(Process(["make"])).read("a"), bytes)
    client.submit_many([Process(["make"])], key="k")[0].download("a", "b")


def _context() -> Context:
    raise NotImplementedError
