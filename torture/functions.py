"""The application whose functions are tortured; they keep the same journal as the children do."""

import asyncio
import os
import time

from holdfast.client.app import Holdfast
from holdfast.runner.function import Context
from torture.child_script import note

app = Holdfast()


def _note(what: str, ctx: Context, said: int) -> None:
    note(os.environ["TORTURE_JOURNAL"], what, {"job": ctx.job_id, "attempt": ctx.attempt, "token": ctx.token}, said)


@app.function()
async def talk(lines: int, pace: float, fail: bool, ctx: Context, first: int = 0, each: int = 0, last: int = 0) -> int:
    """Say something now and then, and end well or not; stop when told to. It uses tokens, if it is told how many."""
    _note("start", ctx, 0)
    ctx.usage(tokens=first)
    for n in range(1, lines + 1):
        ctx.log(f"{ctx.attempt} out {n}")
        _note("tick", ctx, n)
        ctx.usage(tokens=each)
        await asyncio.sleep(pace)
        ctx.cancel.check()
    _note("end", ctx, lines)
    ctx.usage(tokens=last)
    if fail:
        raise RuntimeError("it was asked to fail")
    return lines


@app.function()
async def stumble(ctx: Context) -> int:
    """Fail in the first attempt, and end well in the next."""
    if ctx.attempt == 1:
        raise RuntimeError("it was asked to stumble")
    return ctx.attempt


@app.function()
def block(seconds: float, ctx: Context) -> None:
    """Hear nothing for a while, in a thread."""
    _note("start", ctx, 0)
    time.sleep(seconds)
    _note("end", ctx, 0)
