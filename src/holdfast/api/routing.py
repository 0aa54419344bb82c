"""How an endpoint is declared, and what happens around every call.

An endpoint declares its method, its path and the role that it needs; the types of its parameters `query` and `body`
define what it accepts. Each call passes: guard, caller, rate, role, query, body, the endpoint, its answer as JSON. The
OpenAPI document and the table of roles are made from the same declarations.
"""

import inspect
import typing
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from holdfast import decoding
from holdfast.api.auth import Access, Caller, checked_name
from holdfast.api.depths import DepthCounter
from holdfast.api.direct import DirectExecutor
from holdfast.api.dry_run import FactsOf
from holdfast.api.errors import JSON, MethodNotAllowed, ends_in_action, to_response
from holdfast.api.fanout import Fanout
from holdfast.api.json_body import LargeBodies, declared_size, read_body
from holdfast.api.readiness import Readiness
from holdfast.api.request_types import NoParameters
from holdfast.api.stream import OpenStreams
from holdfast.api.tools import ToolRegistry
from holdfast.config import Settings
from holdfast.errors import Invalid
from holdfast.model import Role
from holdfast.runner.artifacts import ArtifactStore
from holdfast.runner.shared_folder import SharedFolder
from holdfast.runner_specs import invalid_field
from holdfast.store import Store

NOBODY = Caller("nobody", Role.VIEWER, "default")
NAMED = ("/{queue:path}", "/{lane:path}")
"""Paths that end in a name, which may contain a slash."""
T = TypeVar("T")
Endpoint = Callable[..., Awaitable["Reply | Response"]]


@dataclass
class ServiceState:
    """What all endpoints use."""

    store: Store
    settings: Settings
    shared: SharedFolder
    artifacts: ArtifactStore
    access: Access
    fanout: Fanout
    streams: OpenStreams
    tools: ToolRegistry
    facts: FactsOf
    depths: DepthCounter
    readiness: Readiness
    direct: DirectExecutor | None = None
    """What runs jobs in the request, where the queue is off."""
    large_bodies: LargeBodies = field(default_factory=LargeBodies)
    requests: Counter[tuple[str, str, int]] = field(default_factory=Counter)


@dataclass(frozen=True)
class Reply:
    """An answer: a value that becomes JSON, a status, headers."""

    value: Any
    status: int = 200
    headers: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Call:
    """One request, and who makes it."""

    request: Request
    service: ServiceState
    who: Caller

    @property
    def store(self) -> Store:
        return self.service.store

    @property
    def tenant(self) -> str:
        return self.who.tenant

    @property
    def root(self) -> str:
        """Where the service is mounted."""
        return str(self.request.scope.get("root_path", ""))


@dataclass(frozen=True)
class Route:
    """A declared endpoint. `role` None needs no token; `shape` describes a body that the endpoint itself checks."""

    method: str
    path: str
    run: Endpoint
    role: Role | None
    answers: Mapping[int, Any]
    shape: Any = None
    media: str = JSON
    takes: str = JSON
    query: type[msgspec.Struct] = NoParameters
    body: Any = None

    @property
    def summary(self) -> str:
        return (inspect.getdoc(self.run) or "").partition("\n")[0]


class Routes:
    """Collects the endpoints of one resource."""

    def __init__(self) -> None:
        self.all: list[Route] = []

    def add(
        self,
        method: str,
        path: str,
        *,
        role: Role | None,
        answers: Mapping[int, Any],
        shape: Any = None,
        media: str = JSON,
        takes: str = JSON,
    ) -> Callable[[Endpoint], Endpoint]:
        def declare(run: Endpoint) -> Endpoint:
            hints = typing.get_type_hints(run)
            query, body = hints.get("query", NoParameters), hints.get("body")
            body = typing.get_origin(body) or body
            self.all.append(Route(method, path, run, role, answers, shape or body, media, takes, query, body))
            return run

        return declare


def handler(route: Route, find: Callable[[], Awaitable[ServiceState]]) -> Callable[[Request], Awaitable[Response]]:
    """Wrap an endpoint in the steps of every call. No content of a request may cause a 500."""
    takes_query = "query" in inspect.signature(route.run).parameters

    async def handle(request: Request) -> Response:
        service: ServiceState | None = None
        try:
            service = await find()
            if route.path.endswith(NAMED) and ends_in_action(request):
                raise MethodNotAllowed(("POST",))
            call = await _admit(route, service, request)
            given: dict[str, Any] = {name: checked_name(name, text) for name, text in request.path_params.items()}
            query = read_query(request, route.query)
            if takes_query:
                given["query"] = query
            response = await _answered(route, call, given)
        except ClientDisconnect:
            response = Response(status_code=400)  # The client is gone.
        except Exception as error:
            response = to_response(error)
        if service is not None:
            service.requests[route.method, route.path, response.status_code] += 1
        return response

    return handle


async def _admit(route: Route, service: ServiceState, request: Request) -> Call:
    service.access.guard(request)
    if route.role is None:
        return Call(request, service, NOBODY)
    who = await service.access.caller(request)
    who.require(route.role)
    return Call(request, service, who)


async def _answered(route: Route, call: Call, given: dict[str, Any]) -> Response:
    """Read the body and run the endpoint; a large body counts as admitted until the endpoint returns."""
    if route.body is None:
        reply = await route.run(call, **given)
    else:
        service, request = call.service, call.request
        async with service.large_bodies.admitted(declared_size(request, service.settings.max_body_bytes)):
            body = await read_body(request, route.body, service.settings)
            reply = await route.run(call, **given, body=body)
    return reply if isinstance(reply, Response) else _encoded(reply)


def _encoded(reply: Reply) -> Response:
    headers = None if reply.headers is None else dict(reply.headers)
    return Response(msgspec.json.encode(reply.value), reply.status, headers, JSON)


def _takes_text(kind: Any) -> bool:
    """Return whether a type accepts any text, itself or as one of its alternatives."""
    return kind is str or any(_takes_text(part) for part in typing.get_args(kind) if isinstance(part, type | UnionType))


def read_query(request: Request, kind: type[T]) -> T:
    """Turn the query into its struct; only a list field may be given twice."""
    plain: dict[str, Any] = {}
    fields = {field.name: field for field in msgspec.structs.fields(kind)}  # type: ignore[arg-type]
    for name, text in request.query_params.multi_items():
        if not text.isprintable() or len(text) > 2000:
            raise Invalid(name[:60], "is over 2000 characters, or has control characters")
        if name in fields and isinstance(fields[name].default, tuple):
            plain.setdefault(name, []).extend(text.split(",") if name == "status" else [text])
        elif name in plain:
            raise Invalid(name[:60], "is given twice")
        else:
            plain[name] = text
    for name, text in plain.items():  # msgspec reads the word null as no value where a field is not text.
        if isinstance(text, str) and text.lower() == "null" and name in fields and not _takes_text(fields[name].type):
            raise Invalid(name, "is null; leave it out")
    try:
        return decoding.convert(plain, kind, strict=False)
    except msgspec.ValidationError as error:
        raise invalid_field(error, root="") from None
