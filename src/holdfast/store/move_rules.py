"""The tables of the model as SQL: the fragments that the SQL files include and that no file writes down.

`j` is the job, `i` the end of its attempt as the caller asks for it.
"""

from collections.abc import Iterable, Mapping

from holdfast.model import (
    BROKEN,
    COUNTED_CAUSES,
    MOVES,
    STOPPED,
    TERMINAL,
    UNCOUNTED_CAUSES,
    WAITING,
    Cause,
    Phase,
    Status,
    StopKind,
    Verb,
)


def sql_values() -> Mapping[str, str]:
    """Return the fragments by name. Their order is that of the model, whatever order a set has."""
    return {
        "terminal": _list(status for status in Status if status in TERMINAL),
        "broken": _list(status for status in Status if status in BROKEN),
        "waiting": _list(status for status in Status if status in WAITING),
        "stop_status": _by_stop_kind({kind: end.status for kind, end in STOPPED.items()}),
        "stop_code": _by_stop_kind({kind: end.code for kind, end in STOPPED.items()}),
        "stop_message": _by_stop_kind({kind: end.message for kind, end in STOPPED.items()}),
        "stop_codes": _list(dict.fromkeys(end.code for end in STOPPED.values())),
        "stopped_instead": f"i.status = '{Status.QUEUED}' AND j.stop_kind IS NOT NULL",
        "is_queued_again": f"i.status = '{Status.QUEUED}' AND j.stop_kind IS NULL",
        "is_over": _is_over(),
        "is_counted": _is_counted(),
    }


def _list(values: Iterable[str]) -> str:
    return ", ".join(f"'{value}'" for value in values)


def _by_stop_kind(values: Mapping[StopKind, str]) -> str:
    """Return the CASE that says what follows from a stop request."""
    cases = [f"WHEN '{kind}' THEN '{values[kind]}'" for kind in StopKind]
    return f"CASE j.stop_kind {' '.join(cases)} END"


def _is_over() -> str:
    """Return whether the end gives the job a terminal status; never NULL."""
    ends = MOVES[Verb.FINISH][Status.RUNNING] | MOVES[Verb.REQUEUE][Status.RUNNING]
    asked = " AND ".join(f"i.status <> '{status}'" for status in Status if status in ends - TERMINAL)
    stops = " OR ".join(f"j.stop_kind = '{kind}'" for kind in StopKind if STOPPED[kind].status in TERMINAL)
    return f"{asked} OR i.status = '{Status.QUEUED}' AND j.stop_kind IS NOT NULL AND ({stops})"


def _is_counted() -> str:
    """Return whether the end of an attempt uses up one, as `uses_up_attempt` says."""
    never = " AND ".join(f"i.cause <> '{cause}'" for cause in Cause if cause in UNCOUNTED_CAUSES)
    always = " OR ".join(f"i.cause = '{cause}'" for cause in Cause if cause in COUNTED_CAUSES)
    return f"{never} AND (j.phase = '{Phase.STARTED}' OR {always})"
