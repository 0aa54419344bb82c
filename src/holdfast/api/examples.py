"""Examples for the OpenAPI document: requests that work unchanged, and their responses."""

from typing import Any

from holdfast.api.errors import ErrorAnswer
from holdfast.api.request_types import (
    BulkRequest,
    CallerReason,
    JobRequest,
    NewToken,
    PatchQueue,
    PutLane,
    ResolveJob,
    ResumeJob,
)

PROCESS = {
    "runner": "process",
    "spec": {"command": ["sh", "-c", "echo hello"], "env": {"A": "1"}},
    "labels": {"team": "blue"},
    "timeout": 3600,
}
FUNCTION = {"runner": "function", "spec": {"name": "resize"}, "inputs": {"width": 640}, "lane": "images"}
TOOL = {"tool": "render", "inputs": {"rows": 3}}


def _named(**values: Any) -> dict[str, Any]:
    return {name: {"value": value} for name, value in values.items()}


EXAMPLES: dict[Any, dict[str, Any]] = {
    JobRequest: _named(process=PROCESS, function=FUNCTION, tool=TOOL),
    BulkRequest: _named(two={"jobs": [PROCESS, FUNCTION]}),
    CallerReason: _named(why={"reason": "wrong input"}),
    ResumeJob: _named(plain={}, more={"reason": "disk was full", "budget": {"tokens": 100_000}}),
    ResolveJob: _named(by_hand={"result": {"rows": 3}, "reason": "done by hand"}),
    PutLane: _named(database={"check": {"command": ["pg_isready", "-q"], "timeout": 10}}, none={"check": None}),
    PatchQueue: _named(cap={"max_running": 4}, lift={"max_depth": None}),
    NewToken: _named(ci={"name": "ci", "role": "submitter", "tenant": "blue"}),
    ErrorAnswer: _named(unknown={"error": {"code": "not_found", "message": "no job 4711", "details": {"what": "job"}}}),
}
