"""The report that a child may leave in `result.json`: its version, its status, a result or an error."""

from typing import Any, Literal

import msgspec

from holdfast import decoding
from holdfast.runner.collected_outputs import ContractViolation, shown

MAX_RESULT = 1024 * 1024


class ReportedError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    message: str
    code: str = "reported_failure"


class ResultReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `result.json`."""

    version: int
    status: Literal["succeeded", "failed"] = "succeeded"
    result: Any = None
    error: ReportedError | None = None


def parse_report(data: bytes) -> ResultReport:
    try:
        version = decoding.decode(data, dict[str, Any]).get("version")
        if version != 1:
            raise ContractViolation(f"result.json has version {shown(repr(version))}; this holdfast reads version 1")
        report = decoding.decode(data, ResultReport)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ContractViolation(f"result.json cannot be read: {shown(str(error))}") from error
    if report.error is not None and not report.error.code.replace("_", "").isalnum():
        raise ContractViolation(
            f"result.json: error.code {shown(report.error.code)!r} is not letters, digits and underscores"
        )
    return report
