"""The last line that an attempt wrote to stderr, for the message of its error."""

import re
from collections.abc import Iterable

from holdfast.errors import one_line
from holdfast.model import Event

MOST = 300
"""Maximum characters of the line."""
TAIL = 50
"""Lines at the end of a block that are inspected."""
_PSQL = re.compile(r"psql:.+?:\d+: (?!NOTICE|WARNING|INFO|DEBUG|LOG)")
_MORE = re.compile(
    r"LINE \d+:|(?:DETAIL|HINT|CONTEXT|QUERY|STATEMENT|LOCATION):|PL/\w+ function|SQL (?:statement|function)|\s"
)


class LastError:
    """Keeps the last line of stderr. After an error of psql, its explanatory lines (DETAIL, HINT) are skipped."""

    def __init__(self) -> None:
        self._task: str | None = None
        self._line = ""
        self._of_psql = False

    def add_lines(self, task: str | None, lines: list[str]) -> None:
        if task != self._task:
            self._task, self._line, self._of_psql = task, "", False
        for line in lines[-TAIL:]:
            if not any(map(str.isalnum, line)) or (self._of_psql and _MORE.match(line)):
                continue
            self._line, self._of_psql = line, _PSQL.match(line) is not None

    def add_events(self, events: Iterable[Event]) -> None:
        """Feed the lines that are already in the record, in order."""
        for event in events:
            if event.type == "log" and event.data.get("stream") == "stderr":
                self.add_lines(event.task, event.data["lines"])

    def line(self, task: str | None) -> str | None:
        """Return the last line of a task, or of a job without tasks."""
        return one_line(self._line, MOST) or None if task == self._task else None
