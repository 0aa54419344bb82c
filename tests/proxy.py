"""A TCP proxy that can fall silent: its connections stay open, and what is sent through them never arrives."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Proxy:
    """Stands before a server. `swallow` makes all connections of now half open; later ones are whole."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open: set[asyncio.Event] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    def swallow(self) -> int:
        """Return how many connections are half open from now on."""
        for connection in self._open:
            connection.set()
        return len(self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent = asyncio.Event()
        self._open.add(silent)
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pass_on(reader, back, silent))
                group.create_task(_pass_on(there, writer, silent))
        except* OSError:
            pass
        finally:
            self._open.discard(silent)
            for end in (writer, back):
                end.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator["Proxy"]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silent: asyncio.Event) -> None:
    while data := await reader.read(65536):
        if not silent.is_set():
            writer.write(data)
            await writer.drain()
    if not silent.is_set():
        writer.close()
