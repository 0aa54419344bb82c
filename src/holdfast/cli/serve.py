"""`holdfast serve`: the socket, the signals, and the messages on stderr."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator, Mapping
from types import FrameType

import typer
import uvicorn

from holdfast import config
from holdfast.api.app import Api
from holdfast.api.connections import ACCEPT_AT_ONCE, ConnectionLimits, RepeatFilter
from holdfast.assemble_service import api_of, background_of
from holdfast.cli import worker_command
from holdfast.config import Settings
from holdfast.errors import ConfigError

GRACE_SECONDS = 10
BACKLOG = 4096
NOISY = ("uvicorn.error", "asyncio", "holdfast.api.connections", "holdfast.api.errors")
"""Loggers whose messages a client can cause."""
LONGEST = 2**31 - 1


class Server(uvicorn.Server):
    """Ends its streams as soon as it has to stop, and limits its connections."""

    def __init__(self, app: Api, settings: Settings) -> None:
        limits = ConnectionLimits(settings)
        super().__init__(
            uvicorn.Config(
                app,
                http=limits.protocol,  # type: ignore[arg-type]  # It is called like the class that it makes.
                host=settings.host,
                port=settings.port,
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                proxy_headers=False,
                backlog=ACCEPT_AT_ONCE,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )
        self._app = app
        for name in NOISY:
            logger = logging.getLogger(name)
            if not any(isinstance(present, RepeatFilter) for present in logger.filters):
                logger.addFilter(RepeatFilter())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then raise the kernel's backlog: asyncio uses it also as the number of clients to accept."""
        await super().startup(sockets=sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handle signals ourselves: uvicorn would raise them again at the end and die of them."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Shut down gracefully; at a second signal, exit at once. The signal is not raised again."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._app.leave()


def bind(settings: Settings) -> socket.socket:
    """Bind the port now, so that a failure is a plain error message."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Else data for a client that was cut off because it reads nothing would stay forever. Connections inherit this.
        unread = min(int(2000 * settings.stream_stall), LONGEST)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, unread)
        listener.bind(address)
    except OSError as error:
        raise ConfigError([f"cannot listen on {settings.host}:{settings.port}: {error.strerror}"]) from error
    listener.listen(BACKLOG)
    return listener


async def run_server(flags: Mapping[str, object], application: str | None = None) -> None:
    """Run a server, and the duties beside it, so that they run even without a worker."""
    settings, functions = config.load(flags), None
    if not settings.queue_enabled:  # Otherwise workers run the functions, and the application is not needed here.
        settings, functions = worker_command.configure(application, **flags)
    await serve(api_of(settings, background=background_of(settings, functions)), settings)


async def serve(app: Api, settings: Settings) -> None:
    """Serve until a signal. The service runs before the first request can arrive."""
    with bind(settings) as listener:
        async with app.running():
            if app.made_admin:
                typer.echo(f"the first admin token is in {settings.admin_token}", err=True)
            host, port = listener.getsockname()[:2]
            typer.echo(f"holdfast serves on http://{f'[{host}]' if ':' in host else host}:{port}", err=True)
            await Server(app, settings).serve(sockets=[listener])
