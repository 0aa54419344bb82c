"""The calls of the Docker engine's API that holdfast uses. No other module uses aiodocker.

An error response of the engine is an `EngineError` or `NoSuchObject`. Any other failure is EngineUnreachable, which
says nothing about the state of a container.
"""

import base64
import contextlib
import json
import os
import re
import ssl
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
import msgspec

from holdfast import decoding
from holdfast.errors import ConfigError
from holdfast.runner.base import EngineUnreachable
from holdfast.timing import EPOCH

CALL_TIMEOUT = aiohttp.ClientTimeout(total=60.0, sock_connect=5.0)
"""A container may start slowly on a busy machine; a connection should not."""
CHECK_TIMEOUT = aiohttp.ClientTimeout(total=5.0)
WAIT_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0)
STREAM_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=60.0)
"""Limits the pauses in a response of any length: a silent connection is closed."""
MULTIPLEXED = struct.Struct(">BxxxL")
IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@-]*")
RESTRICTING = ("name=userns", "name=rootless", "name=selinux")
"""Security options of an engine whose containers have other users or labels than the files of the host."""
IDLE_SECONDS = 600.0
"""How long an idle connection is kept: a new one costs a check of the engine's identity before the next start. Only on
this host: a firewall may drop an idle connection without a word."""
UNCONNECTED = 900
"""The status that aiodocker reports for an engine that cannot be reached."""


class EngineError(Exception):
    """The engine returned an error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class NoSuchObject(EngineError):
    """The engine has no such container, image, volume or file."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The identity of an engine, its number of processors, and its wall clock in seconds when it answered."""

    id: str
    root: str
    host: str
    processors: int
    time: float
    restricts_mounts: bool = False
    """Whether a container may be unable to read a file of the host that is mounted into it."""


class ImageInfo(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    env: Sequence[str]
    command: Sequence[str]
    entrypoint: Sequence[str]
    folder: str


class ContainerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A container as the engine sees it. `status`: created, running, paused, restarting, removing, exited or dead."""

    id: str
    labels: Mapping[str, str]
    status: str
    user: str
    exit_code: int = 0
    out_of_memory: bool = False
    error: str = ""
    mounts: Mapping[str, str] | None = None
    """The paths of mounts on the engine's host, by their path in the container; None: not looked up yet."""

    @property
    def runs(self) -> bool:
        return self.status in ("running", "paused", "restarting")


class _Event(msgspec.Struct, frozen=True):
    id: str


class Engine:
    """One engine. Created inside the event loop that uses it."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.connections = 0
        """How many connections with a time limit were opened. An open connection leads to the same engine as before."""
        self._limited = _client(host, CALL_TIMEOUT, self._connected)
        self._without_limit = _client(host, WAIT_TIMEOUT)

    async def close(self) -> None:
        for client in (self._limited, self._without_limit):
            await client.close()
            await client.session.close()

    async def _connected(self, *_: object) -> None:
        self.connections += 1

    async def ping(self) -> None:
        async with self._ask("GET", "_ping", timeout=CHECK_TIMEOUT, versioned_api=False) as answer:
            await answer.read()

    async def info(self) -> EngineInfo:
        found = await self._json("GET", "info", timeout=CHECK_TIMEOUT)
        return EngineInfo(
            id=found["ID"],
            root=found["DockerRootDir"],
            host=found["Name"],
            processors=found.get("NCPU") or 0,
            time=to_seconds(found["SystemTime"]),
            restricts_mounts=any(option in RESTRICTING for option in found.get("SecurityOptions") or ()),
        )

    async def image(self, name: str) -> ImageInfo:
        if not IMAGE.fullmatch(name) or ".." in name:
            raise NoSuchObject(404, f"{name} cannot be an image's name")
        found = await self._json("GET", f"images/{name}/json")
        config = found.get("Config") or {}
        return ImageInfo(
            id=found["Id"],
            env=config.get("Env") or (),
            command=config.get("Cmd") or (),
            entrypoint=config.get("Entrypoint") or (),
            folder=config.get("WorkingDir") or "",
        )

    async def create(self, name: str, config: Mapping[str, Any]) -> str:
        body = json.dumps(config).encode()
        found = await self._json("POST", "containers/create", params={"name": name}, data=body)
        return str(found["Id"])

    async def start(self, container: str) -> None:
        async with self._ask("POST", f"containers/{container}/start") as answer:
            await answer.read()

    async def inspect(self, container: str) -> ContainerInfo:
        found = await self._json("GET", f"containers/{container}/json")
        state = found["State"]
        return ContainerInfo(
            id=found["Id"],
            labels=found["Config"].get("Labels") or {},
            status=state["Status"],
            user=found["Config"].get("User") or "",
            exit_code=state["ExitCode"],
            out_of_memory=bool(state.get("OOMKilled")),
            error=state.get("Error") or "",
            mounts={one.get("Destination", ""): one.get("Source", "") for one in found.get("Mounts") or ()},
        )

    async def wait(self, container: str) -> None:
        """Wait until a container stops. Ends early if the engine disappears."""
        async with self._ask("POST", f"containers/{container}/wait", unlimited=True) as answer:
            await answer.read()

    async def exits(self, label: str, since: float) -> AsyncGenerator[str | None, None]:
        """Yield None once the stream is open, then the id of each container with a label that ends.

        Begins with the ends since a time of the engine's clock, as far as the engine remembers them.
        """
        filters = json.dumps({"type": ["container"], "event": ["die"], "label": [label]})
        params = {"filters": filters, "since": f"{since:.0f}"}
        async with self._ask("GET", "events", params=params, unlimited=True) as answer:
            yield None
            buffer = b""
            async for chunk in answer.content.iter_any():
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in filter(bytes.strip, lines):
                    try:
                        yield decoding.decode(line, _Event).id
                    except msgspec.MsgspecError as error:
                        raise self._unreachable(error) from error

    async def remove(self, container: str) -> None:
        """Remove a stopped container and its own volume."""
        async with self._ask("DELETE", f"containers/{container}", params={"v": "1"}) as answer:
            await answer.read()

    async def put(self, container: str, folder: str, archive: bytes) -> None:
        """Unpack a tar archive into a folder of a volume."""
        path = f"containers/{container}/archive"
        async with self._ask("PUT", path, params={"path": folder}, data=archive, kind="application/x-tar") as answer:
            await answer.read()

    async def changed_at(self, container: str, path: str) -> float:
        """Return when a file or folder was last changed. This takes a thirtieth of the time of fetching it."""
        # Not by aiodocker's own call, which fails on an error response to a HEAD request. And not by the client with a
        # time limit: aiohttp closes the connection after such a response, and a new one would have to be checked.
        client = self._without_limit
        url = client._canonicalize_url(f"containers/{container}/archive")
        try:
            async with client.session.head(url, params={"path": path}, timeout=CALL_TIMEOUT) as answer:
                if answer.status >= 400:
                    raise (NoSuchObject if answer.status == 404 else EngineError)(
                        answer.status, f"{path} cannot be inspected"
                    )
                about = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))
                return to_seconds(about["mtime"])
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, KeyError) as error:
            raise self._unreachable(error) from error

    async def get(self, container: str, wanted: str) -> AsyncGenerator[bytes, None]:
        """Yield a file or folder as a tar stream."""
        params = {"path": wanted}
        path = f"containers/{container}/archive"
        async with self._ask("GET", path, params=params, unlimited=True, timeout=STREAM_TIMEOUT) as answer:
            async for chunk in answer.content.iter_any():
                yield chunk

    async def log(
        self, container: str, *, since: str = "", follow: bool = True, stream: str = "stdout"
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yield the lines of a container's log with their timestamps, starting at `since`."""
        params = {stream: "1", "timestamps": "1", "follow": "1" if follow else "0"} | (
            {"since": since} if since else {}
        )
        async with self._ask("GET", f"containers/{container}/logs", params=params, unlimited=True) as answer:
            buffer = b""
            async for chunk in answer.content.iter_any():
                buffer += chunk
                start = 0
                while len(buffer) >= start + MULTIPLEXED.size:
                    _, length = MULTIPLEXED.unpack_from(buffer, start)
                    end = start + MULTIPLEXED.size + length
                    if len(buffer) < end:
                        break
                    at, _, line = buffer[start + MULTIPLEXED.size : end].partition(b" ")
                    yield at.decode("ascii", "replace"), line
                    start = end
                buffer = buffer[start:]

    async def containers(self, label: str) -> Sequence[tuple[str, Mapping[str, str], float]]:
        """Return id, labels and time of creation of all containers with a label."""
        filters = json.dumps({"label": [label]})
        found = await self._json("GET", "containers/json", params={"all": "1", "filters": filters})
        return [(one["Id"], one["Labels"], float(one["Created"])) for one in found]

    async def unused_volumes(self, label: str) -> Sequence[tuple[str, float]]:
        """Return name and time of creation of the volumes with a label that no container uses."""
        filters = json.dumps({"label": [label], "dangling": ["true"]})
        found = await self._json("GET", "volumes", params={"filters": filters})
        return [(one["Name"], to_seconds(one["CreatedAt"])) for one in found.get("Volumes") or ()]

    async def remove_volume(self, name: str) -> None:
        async with self._ask("DELETE", f"volumes/{name}") as answer:
            await answer.read()

    async def _json(self, method: str, path: str, **more: Any) -> Any:
        async with self._ask(method, path, **more) as answer:
            return await answer.json()

    @asynccontextmanager
    async def _ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        data: bytes | None = None,
        kind: str = "application/json",
        unlimited: bool = False,
        timeout: aiohttp.ClientTimeout | None = None,
        versioned_api: bool = True,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        client = self._without_limit if unlimited else self._limited
        try:
            async with contextlib.AsyncExitStack() as open_:
                query = client._query(
                    path,
                    method,
                    params=dict(params or {}),
                    data=data,
                    headers={"Content-Type": kind},
                    timeout=timeout or (WAIT_TIMEOUT if unlimited else CALL_TIMEOUT),
                    versioned_api=versioned_api,
                )
                answer = await open_.enter_async_context(query)
                open_.callback(answer.close if unlimited else answer.release)
                yield answer
        except aiodocker.DockerError as error:
            if error.status >= UNCONNECTED or error.status < 400:
                raise EngineUnreachable(f"the Docker engine at {self.host} does not answer: {error.message}") from error
            raise (NoSuchObject if error.status == 404 else EngineError)(error.status, error.message) from error
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> EngineUnreachable:
        why = str(error) or type(error).__name__
        return EngineUnreachable(f"the Docker engine at {self.host} does not answer: {why}")


def _client(
    host: str, timeout: aiohttp.ClientTimeout, connected: Callable[..., Awaitable[None]] | None = None
) -> aiodocker.Docker:
    """Create a client without a limit on connections: each running container uses two."""
    scheme, _, where = host.partition("://")
    connector: aiohttp.BaseConnector
    if scheme == "unix":
        url, connector = "http://docker", aiohttp.UnixConnector(where, limit=0, keepalive_timeout=IDLE_SECONDS)
    else:
        trust = _trust()
        connector = aiohttp.TCPConnector(limit=0, ssl=trust if trust is not None else True)
        url = f"{'https' if scheme == 'https' or trust is not None else 'http'}://{where}"
    trace = aiohttp.TraceConfig()
    if connected is not None:
        trace.on_connection_create_end.append(connected)
    session = aiohttp.ClientSession(connector=connector, timeout=timeout, trace_configs=[trace])
    return aiodocker.Docker(url, connector=connector, session=session, timeout=timeout)


def _trust() -> ssl.SSLContext | None:
    """Read Docker's two variables for TLS: whether to use it, and with which certificates."""
    if not os.environ.get("DOCKER_TLS_VERIFY"):
        return None
    folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
    try:
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    except OSError as error:
        raise ConfigError(
            [f"DOCKER_TLS_VERIFY is set, and the certificates in {folder} cannot be read: {error}"]
        ) from None
    return context


def to_seconds(text: str) -> float:
    """Parse a time of the engine, with up to nine decimal digits; digits after the sixth are cut off."""
    whole, point, rest = text.partition(".")
    if point:
        digits = re.match(r"\d*", rest)
        assert digits is not None
        text = f"{whole}.{digits[0][:6].ljust(6, '0')}{rest[digits.end() :]}"
    return (datetime.fromisoformat(text.replace("Z", "+00:00")) - EPOCH).total_seconds()
