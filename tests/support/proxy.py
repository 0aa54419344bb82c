"""A TCP proxy between a part and its database or engine that can fall silent, be slow, or hang up in one direction."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path


class _Connection:
    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.silent = False


class Proxy:
    """Stands before a server, by its port or the path of its socket.

    What `swallow` did stays so for the connections of then; later ones are whole.
    """

    def __init__(self, target: int | Path) -> None:
        self._target = target
        self._open: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0
        self.delay = 0.0
        """Seconds that every piece is held back."""
        self.cut_off = False
        """Whether new connections fall silent too."""
        self.greets_only = False
        """Whether new connections fall silent once the client and the server have greeted each other."""

    def swallow(self) -> int:
        """Return how many connections are half open from now on: they stay open, and nothing arrives."""
        for connection in self._open:
            connection.silent = True
        return len(self._open)

    def half_close(self) -> int:
        """End the server's direction of every connection; return how many. The client's stays open."""
        for connection in self._open:
            with contextlib.suppress(OSError, RuntimeError):
                connection.client.write_eof()
        return len(self._open)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await self._connect()
        except OSError:  # The server is away: so are we.
            writer.close()
            return
        connection = _Connection(writer, back)
        connection.silent = self.cut_off
        self._open.add(connection)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, back, connection))
                group.create_task(self._pass_on(there, writer, connection))
        except* (OSError, RuntimeError):
            pass
        finally:
            self._open.discard(connection)
            for end in (writer, back):
                end.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, Path):
            return await asyncio.open_unix_connection(self._target)
        return await asyncio.open_connection("127.0.0.1", self._target)

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: _Connection
    ) -> None:
        while data := await reader.read(65536):
            if self.greets_only and writer is connection.server and data[:1] in b"PQ":
                connection.silent = True  # The first query of a Postgres client.
            if self.delay:
                await asyncio.sleep(self.delay)  # Reason: this is the delay of the network.
            if not connection.silent:
                writer.write(data)
                await writer.drain()
        if not connection.silent:
            writer.close()

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
