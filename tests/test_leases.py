"""What workers do: claim, adopt, start, beat, finish, requeue, hand over; and the reaper."""

from tests.stage import Stage


async def test_finish_succeeds(stage: Stage) -> None:
    job = await stage.submit()
    await stage.run_one()
    assert await stage.status(job) == "succeeded"
