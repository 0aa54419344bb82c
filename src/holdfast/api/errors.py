"""Errors as callers see them: one shape, `{"error": {"code", "message", "details"}}`, for all that is refused."""

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
    Blocked,
    ConfigError,
    HoldfastError,
    Needed,
    RateLimited,
    StoreError,
    StoreUnreachable,
    Unauthorized,
)

log = logging.getLogger(__name__)

JSON = "application/json"
ACTIONS = ("/pause", "/resume")
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
    """Say what went wrong; what only an operator should read goes to the log."""
    if isinstance(error, HTTPException):
        return _http_response(error)
    if not isinstance(error, HoldfastError):
        log.error("a request failed", exc_info=error)
        return _respond(500, Problem(code="internal", message="holdfast failed; its log says why"))
    headers = {}
    if isinstance(error, StoreError | ConfigError):
        reported = isinstance(error, StoreUnreachable) and error.reported
        log.log(logging.DEBUG if reported else logging.ERROR, "%s: %s", error.code, error.message)
        return _respond(error.status, Problem(code=error.code, message=AWAY), {"Retry-After": "1"})
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, AtCapacity):
        headers["Retry-After"] = "1"
    if isinstance(error, RateLimited):
        headers["Retry-After"] = str(max(1, round(error.wait)))
    return _respond(error.status, to_problem(error), headers, blocked=isinstance(error, Blocked | Needed))


def to_problem(error: HoldfastError) -> Problem:
    details = {name: value for name, value in vars(error).items() if name != "message"}
    return Problem(code=error.code, message=error.message, details=details)


class NoSuchMethod(HTTPException):
    """A path that is there, and takes other methods."""

    def __init__(self, allowed: Iterable[str]) -> None:
        super().__init__(405, headers={"Allow": ", ".join(sorted(allowed))})


async def not_routed(request: Request, error: Exception) -> Response:
    """Answer for a path or method that is not there."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        error = NoSuchMethod(_methods(request))
    return _http_response(error)


def _methods(request: Request) -> set[str]:
    """Every method that some route has for this path; the router names those of the first alone."""
    found = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    if ends_in_action(request):
        found = [route for route in found if route.path.endswith(ACTIONS)] or found
    return {method for route in found for method in getattr(route, "methods", None) or ()}


def ends_in_action(request: Request) -> bool:
    """Whether the end of a path is an action, and not part of a name: there the slash would be `%2F`."""
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
