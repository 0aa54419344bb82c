"""The OpenAPI document, made from the declared routes and their request and response types."""

import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

import msgspec

from holdfast.api import VERSION
from holdfast.api.auth import MAX_NAME, TENANT
from holdfast.api.errors import JSON, BlockedAnswer, ErrorAnswer
from holdfast.api.examples import EXAMPLES
from holdfast.api.routing import Route
from holdfast.model import Role
from holdfast.registry import connectors, runners
from holdfast.submission import MAX_KEY

REF = "#/components/schemas/{name}"
ABOUT = (
    "A durable execution queue. Every call except the probes needs a token: `Authorization: Bearer hf_…`. "
    "Times are aware UTC, durations seconds, ids UUIDs; unknown fields are refused."
)
ERRORS = {
    400: "not JSON, or not declared as JSON",
    401: "no token, or an unknown one",
    403: "the token may not do this",
    404: "not found in this tenant",
    408: "the body arrived too slowly",
    409: "not in a state that allows this",
    413: "too large",
    422: "a value that cannot be accepted; `details.field` names it",
    429: "too many requests or streams with this token, or too many jobs in this queue",
    503: "the database does not answer; or `at_capacity`, where the queue is off",
}
PUBLIC_NAMES = {
    "ArtifactList": "ArtifactViews",
    "AttemptList": "Attempts",
    "AuditList": "AuditEntries",
    "CreatedToken": "MadeToken",
    "DeletedJob": "Deleted",
    "DeletedSnapshots": "RemovedSnapshots",
    "DeletedToken": "Removed",
    "DrainedWorkers": "Drained",
    "EmptyBody": "Nothing",
    "EventList": "Events",
    "JobIds": "Ids",
    "JobList": "JobViews",
    "LaneList": "Lanes",
    "LostHost": "Lost",
    "QueueList": "Queues",
    "ResolveJob": "Resolve",
    "ResumeJob": "Resume",
    "RetryPolicy": "Retry",
    "SnapshotList": "Snapshots",
    "TaskList": "TaskRecords",
    "TaskSpec": "Task",
    "TokenList": "Tokens",
    "ToolList": "Tools",
    "WorkerList": "Workers",
    "WorkerRecord": "Worker",
}
"""Types whose schema has another name in the document: clients that were generated from it use these names."""
PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


def document(routes: Sequence[Route]) -> dict[str, Any]:
    shapes = [ErrorAnswer, BlockedAnswer, *(kind for route in routes for kind in _kinds(route))]
    unique = list(dict.fromkeys(kind for kind in shapes if kind not in (None, str, dict)))
    schemas, components = msgspec.json.schema_components(unique, ref_template=REF)
    schemas, components = _with_public_names(schemas), _with_public_names(components)
    _name_known(components)
    schema_of = dict(zip(unique, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "holdfast", "version": VERSION, "description": ABOUT},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _with_public_names(part: Any) -> Any:
    """Return schemas in which every reference, title and key uses the public name of a type."""
    text = msgspec.json.encode(part).decode()
    for name, public in PUBLIC_NAMES.items():
        text = text.replace(f'"{REF.format(name=name)}"', f'"{REF.format(name=public)}"')
        text = text.replace(f'"title":"{name}"', f'"title":"{public}"').replace(f'"{name}":{{', f'"{public}":{{')
    return msgspec.json.decode(text)


def _name_known(components: dict[str, Any]) -> None:
    """List the runners and connectors that this server knows, in the fields of a request that name one."""
    for field, known in (("runner", runners()), ("connector", connectors())):
        shape = components["JobRequest"]["properties"][field]
        shape["anyOf"] = [{"enum": list(known)}, {"type": "null"}]


def _kinds(route: Route) -> Iterable[Any]:
    for kind in route.answers.values():
        yield from kind if isinstance(kind, tuple) else (kind,)
    if route.shape is not dict:
        yield route.shape


def _operation(route: Route, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.run.__name__,
        "summary": route.summary,
        "tags": [route.path.split("/")[2] if route.path.startswith("/v1/") else "probes"],
        "parameters": [*_path_parameters(route), *_query_parameters(route), *_headers(route)],
        "responses": {**_answers(route, schema_of), **_refusals(route, schema_of)},
    }
    if route.role is not None:
        operation["security"] = [{"token": []}]
        operation["description"] = f"Needs the role `{route.role}`."
    if route.shape is not None:
        content: dict[str, Any] = {"schema": schema_of[route.shape]}
        if route.shape in EXAMPLES:
            content["examples"] = EXAMPLES[route.shape]
        required = any(field.required for field in msgspec.structs.fields(route.shape)) or route.body is dict
        operation["requestBody"] = {"required": required, "content": {route.takes: content}}
    return operation


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1, "maxLength": 200}}
        for name in PARAMETER.findall(route.path)
    ]


def _query_parameters(route: Route) -> list[dict[str, Any]]:
    found = []
    for field in msgspec.structs.fields(route.query):
        schema = msgspec.json.schema(_without_null(field.type), ref_template=REF)
        schema.pop("$defs", None) if "$ref" not in str(schema) else _inline(schema)
        found.append({"name": field.name, "in": "query", "required": field.required, "schema": schema})
    return found


def _without_null(kind: Any) -> Any:
    """Drop null from a query field's type: an optional field is given or left out."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        (kind,) = (part for part in typing.get_args(kind) if part is not type(None))
    return kind


def _inline(schema: dict[str, Any]) -> None:
    """Inline the one enumeration that a query refers to."""
    (definition,) = schema.pop("$defs").values()
    schema["items"] = definition


def _headers(route: Route) -> list[dict[str, Any]]:
    if route.role is None:
        return []
    headers = [(TENANT, "the tenant that an admin acts in", _text(MAX_NAME))]
    if route.path in ("/v1/jobs", "/v1/jobs/bulk") and route.method == "POST":
        about = "the same call with the same key returns the same answer for 24 hours"
        headers.append(("Idempotency-Key", about, _text(MAX_KEY)))
    if route.path == "/v1/jobs" and route.method == "POST":
        about = "`wait=10`: where the queue is off, answer after at most 10 seconds; other preferences are ignored"
        headers.append(
            ("Prefer", about, {"type": "string"})
        )  # RFC 7240: a server ignores preferences that it does not know.
    if route.path.endswith("/events/stream"):
        seq = {"type": "string", "pattern": "^[0-9]{1,19}$"}
        headers.append(("Last-Event-ID", "the last seq that was seen; takes precedence over `after`", seq))
    return [{"name": name, "in": "header", "schema": kind, "description": about} for name, about, kind in headers]


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": most}


def _answers(route: Route, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for status, kind in route.answers.items():
        schema = {"anyOf": [schema_of[one] for one in kind]} if isinstance(kind, tuple) else schema_of.get(kind)
        content: dict[str, Any] = {"schema": schema or {"type": "string"}}
        if kind in EXAMPLES:
            content["examples"] = EXAMPLES[kind]
        media = {route.media: content}
        if route.run.__name__ == "list_events":
            media["application/x-ndjson"] = {"schema": {"type": "string"}}
        found[str(status)] = {"description": HTTPStatus(status).phrase, "content": media}
        if status == 201 and route.path == "/v1/jobs":
            found["201"]["headers"] = {"Location": {"schema": {"type": "string"}}}
    return found


def _refusals(route: Route, schema_of: Mapping[Any, Any]) -> dict[str, Any]:
    statuses = set(ERRORS) - ({408, 409, 413, 400} if route.method == "GET" else set())
    if route.role in (None, Role.VIEWER) and route.role is None:
        statuses = {400, 403, 422, 503}
    refusals = {}
    for status in sorted(statuses):
        kind = BlockedAnswer if status == 409 and route.method == "DELETE" else ErrorAnswer
        refusals[str(status)] = {"description": ERRORS[status], "content": {JSON: {"schema": schema_of[kind]}}}
    return refusals
