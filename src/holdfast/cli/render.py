"""What commands print for people: tables, single jobs and events."""

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from holdfast.cli.job_text import short_id, what
from holdfast.cli.terminal import visible
from holdfast.model import Attempt, Event, Job, Status, TaskRecord

COLOURS = {
    Status.SUCCEEDED: "green",
    Status.RUNNING: "cyan",
    Status.QUEUED: "blue",
    Status.PENDING: "blue",
    Status.PAUSED: "yellow",
    Status.FAILED: "red",
    Status.TIMED_OUT: "red",
    Status.CANCELLED: "magenta",
}
PIPED = 1000
"""Line width if the output is not a terminal: nothing should be cut."""


def _console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED
    return console


console = _console()


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print a table, or one line if there is nothing. On a terminal a row is one line: long cells are cut."""
    made = grid(columns, rows)
    console.print(empty if made is None else made)


def grid(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table | None:
    """Return a table, or None if it has no rows."""
    shown = [[_line(_cell(value)) for value in row] for row in rows]
    if not shown:
        return None
    # The first column is the id or name: it must not be cut, so that it can be copied.
    named = Column(columns[0], no_wrap=True)
    made = Table(named, *columns[1:], box=None, pad_edge=False, header_style="bold")
    for row in shown:
        made.add_row(*row)
    return made


def _line(cell: str) -> Text:
    """Return a cell that is cut where its column ends; if the output is not a terminal, no column is too narrow."""
    text = Text.from_markup(cell)
    if console.is_terminal:
        text.plain, text.no_wrap, text.overflow = text.plain.replace("\n", " "), True, "ellipsis"
    return text


def more(cursor: str | None) -> None:
    """Print how to get the next page, in one line that can be copied."""
    if cursor:
        console.print(escape(f"more: --cursor {shown(cursor)}"), style="dim", soft_wrap=True)


def _cell(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, Status):
        return coloured(value)
    if isinstance(value, datetime):
        return ago(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return escape(shown(str(value)))


def shown(text: str) -> str:
    """Return text from a job or a server in a form that is safe for this output."""
    return visible(text) if console.is_terminal else text


def coloured(status: Status) -> str:
    return f"[{COLOURS[status]}]{status}[/]"


def ago(at: datetime, now: datetime | None = None) -> str:
    """Return how long ago something was, in one unit."""
    seconds = ((now or datetime.now(UTC)) - at).total_seconds()
    ahead = seconds < 0
    seconds = abs(seconds)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if seconds >= size:
            text = f"{seconds / size:.0f} {unit}"
            return f"in {text}" if ahead else f"{text} ago"
    return "now"


def moment(text: str | None) -> datetime | None:
    """Return a time in the format of the JSON API."""
    return None if text is None else datetime.fromisoformat(text)


def counts(values: Mapping[str, int]) -> str:
    """Return those counts that are not zero."""
    return " ".join(f"{name}={count}" for name, count in values.items() if count)


def slots(queues: Mapping[str, int]) -> str:
    return " ".join(f"{queue}:{count}" for queue, count in queues.items())


def facts(values: Mapping[str, Any]) -> None:
    """Print a line for each field that has a value."""
    shown = {name: _fact(name, value) for name, value in values.items() if value not in (None, "", {}, [], ())}
    width = max(map(len, shown), default=0)
    for name, value in shown.items():
        console.print(f"  {name.replace('_', ' '):<{width}}  {_cell(value)}")


def _fact(name: str, value: Any) -> Any:
    if isinstance(value, str) and name.endswith("_at"):
        return moment(value)
    return msgspec.json.encode(value).decode() if isinstance(value, dict | list) else value


def tasks(items: Sequence[TaskRecord]) -> None:
    table(
        ("task", "status", "snapshot", "exit", "started", "ended"),
        (
            (one.name, f"{one.status}{', cached' if one.cached else ''}", one.snapshot and one.snapshot[:12],
             one.exit_code, one.started_at, one.ended_at)
            for one in items
        ),
        empty="",
    )  # fmt: skip


def jobs(items: Sequence[Job]) -> None:
    table(*job_rows(items), empty="no jobs")


def job_rows(items: Sequence[Job]) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
    """Return the columns and rows of a list of jobs. On a terminal, columns that tell nothing apart are left out."""
    columns: dict[str, list[object]] = {
        "id": [short_id(job.id) for job in items],
        "status": [job.status for job in items],
        "what": [what(job) for job in items],
        "kind": [job.kind for job in items],
        "queue": [job.queue for job in items],
        "lane": [job.lane for job in items],
        "attempts": [f"{job.attempts}/{job.max_attempts}" for job in items],
        "requested": [job.requested_at for job in items],
        "error": [job.error and job.error.code for job in items],
    }
    usual: dict[str, set[object]] = {
        "kind": {"run"},
        "queue": {"default"},
        "lane": {None},
        "attempts": {"0/1", "1/1"},
        "error": {None},
    }
    if console.is_terminal:
        columns = {name: cells for name, cells in columns.items() if not set(cells) <= usual.get(name, set())}
    return list(columns), list(zip(*columns.values(), strict=True))


def job(one: Job, attempts: Sequence[Attempt]) -> None:
    """Print one job for a person."""
    values: dict[str, Any] = {
        "status": one.status,
        "kind": one.kind,
        "runner": f"{one.runner} {what(one)}",
        "queue": one.queue,
        "lane": one.lane,
        "labels": _pairs(one.labels),
        "requested": one.requested_at,
        "started": one.started_at,
        "finished": one.finished_at,
        "worker": one.lease and one.lease.owner,
        "stop request": one.stop_request and one.stop_request.kind,
        "progress": _pairs(one.progress or {}),
        "usage": _pairs(one.usage),
        "exit code": one.exit_code,
        "error": one.error and f"{one.error.code}: {one.error.message}",
        "result": one.result,
    }
    console.print(f"[bold]{one.id}[/]")
    facts(values)
    if attempts:
        table(
            ("attempt", "worker", "cause", "exit", "claimed", "ended"),
            (
                (a.attempt, _holders(a), a.cause or a.phase, a.exit_code if a.signal is None else f"signal {a.signal}",
                 a.claimed_at, a.ended_at)
                for a in attempts
            ),
            empty="",
        )  # fmt: skip


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def event_line(event: Event) -> str | None:
    """Format an event as one line for a follower; log lines are printed as they are."""
    data: Mapping[str, Any] = event.data
    match event.type:
        case "log":
            return None
        case "status":
            extra = " ".join(str(data[name]) for name in ("code", "message") if data.get(name))
            return f"{data['status']} {extra}".strip()
        case "task" if "plan" in data:
            again = "planned again" if data.get("replanned") else "planned"
            return f"{again}: {' → '.join(data['tasks'])}"
        case "task":
            return f"{event.task}: {data['status']}{', cached' if data.get('cached') else ''}"
        case "progress":
            percent = f"{data['percent']:g} % " if isinstance(data.get("percent"), int | float) else ""
            return f"{percent}{data.get('message', '')}".strip()
    return f"{event.type} {_pairs(data)}"


def _holders(attempt: Attempt) -> str | None:
    """Return the worker that claimed an attempt and, if it was adopted, its last adopter."""
    if attempt.last_worker in (None, attempt.worker):
        return attempt.worker
    return f"{attempt.worker}, then {attempt.last_worker}"
