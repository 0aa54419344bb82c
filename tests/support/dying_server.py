"""A real server that kills itself at a step of a deletion: `python -m tests.support.dying_server STEP`."""

import asyncio
import os
import signal
import sys

from holdfast import config
from holdfast.api.app import Api
from holdfast.assemble import attach_job_files, connected, folder_artifacts
from holdfast.assemble_service import background_of, facts_of
from holdfast.cli.serve import serve
from holdfast.store import Store


async def main(fatal: str) -> None:
    settings = config.load()

    def at(step: str) -> None:
        if step == fatal:
            os.kill(os.getpid(), signal.SIGKILL)

    async def connect() -> Store:
        store = await connected(settings)
        await attach_job_files(store, settings, at=at)
        return store

    await serve(Api(settings, connect, facts_of(settings), folder_artifacts, background_of(settings)), settings)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
