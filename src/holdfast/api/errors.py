"""Errors as callers see them: one shape, `{"error": {"code", "message", "details"}}`, for all that is refused."""

import logging
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

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


async def not_routed(_: Request, error: Exception) -> Response:
    """Answer for a path or method that is not there."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    phrase = HTTPStatus(status).phrase.lower()
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    return _respond(status, Problem(code=phrase.replace(" ", "_"), message=phrase), headers)


def _respond(
    status: int, problem: Problem, headers: dict[str, str] | None = None, *, blocked: bool = False
) -> Response:
    answer = BlockedAnswer(error=problem) if blocked else ErrorAnswer(error=problem)
    return Response(msgspec.json.encode(answer, enc_hook=str), status, headers, JSON)
