"""Errors as callers see them: `{"error": {"code", "message", "details"}}` for every refused request."""

import logging
from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

from holdfast.errors import (
    AtCapacity,
    ConfigError,
    HoldfastError,
    JobNotEnded,
    RateLimited,
    SnapshotInUse,
    StoreError,
    StoreFull,
    StoreUnreachable,
    Unauthorized,
)

log = logging.getLogger(__name__)

JSON = "application/json"
ACTIONS = ("/pause", "/resume")
FULL = "the disk of the database is full: nothing was changed; make room, or delete jobs with force"
AWAY = "the database cannot be used at the moment; try again"


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str
    details: dict[str, Any] = {}


class ErrorAnswer(msgspec.Struct, frozen=True, kw_only=True):
    error: Problem


class BlockedAnswer(ErrorAnswer, frozen=True, kw_only=True):
    outcome: str = "blocked"


def to_response(error: Exception) -> Response:
    """Turn an error into a response; details for the operator go to the log."""
    if isinstance(error, HTTPException):
        return _http_response(error)
    if not isinstance(error, HoldfastError):
        log.error("a request failed with an unexpected error; answered 500", exc_info=error)
        return _respond(500, Problem(code="internal", message="internal error; see the server's log"))
    headers = {}
    if isinstance(error, StoreError | ConfigError):
        reported = isinstance(error, StoreUnreachable) and error.reported
        log.log(
            logging.DEBUG if reported else logging.ERROR,
            "answered a request with %d %s: %s",
            error.status,
            error.code,
            error.message,
        )
        message = FULL if isinstance(error, StoreFull) else AWAY
        return _respond(error.status, Problem(code=error.code, message=message), {"Retry-After": "1"})
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, AtCapacity):
        headers["Retry-After"] = "1"
    if isinstance(error, RateLimited):
        headers["Retry-After"] = str(max(1, round(error.wait)))
    return _respond(error.status, to_problem(error), headers, blocked=isinstance(error, JobNotEnded | SnapshotInUse))


def to_problem(error: HoldfastError) -> Problem:
    details = {name: value for name, value in vars(error).items() if name != "message"}
    return Problem(code=error.code, message=error.message, details=details)


class MethodNotAllowed(HTTPException):
    """The path exists, but not with this method."""

    def __init__(self, allowed: Iterable[str]) -> None:
        super().__init__(405, headers={"Allow": ", ".join(sorted(allowed))})


async def unknown_route(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown path or method."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        error = MethodNotAllowed(_methods(request))
    return _http_response(error)


def _methods(request: Request) -> set[str]:
    """Return the methods of all routes for this path; the router names only those of the first."""
    found = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    if ends_in_action(request):
        found = [route for route in found if route.path.endswith(ACTIONS)] or found
    return {method for route in found for method in getattr(route, "methods", None) or ()}


def ends_in_action(request: Request) -> bool:
    """Return whether a path ends in an action, and not in a name, where the slash would be `%2F`."""
    raw: bytes = request.scope.get("raw_path", b"")
    return raw.decode("latin-1").endswith(ACTIONS)


def _http_response(error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    phrase = HTTPStatus(status).phrase.lower()
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return _respond(status, Problem(code=phrase.replace(" ", "_"), message=phrase), headers)


def _respond(
    status: int, problem: Problem, headers: dict[str, str] | None = None, *, blocked: bool = False
) -> Response:
    answer = BlockedAnswer(error=problem) if blocked else ErrorAnswer(error=problem)
    return Response(msgspec.json.encode(answer, enc_hook=str), status, headers, JSON)
