"""Did workers and servers end only when they were told to, or killed?"""

from collections.abc import Iterator, Mapping

from torture.cases import Case
from torture.history import History

Found = Iterator[tuple[str, str]]

STRUCK = frozenset({"kill worker", "end worker", "kill server", "end server"})
NO_DATABASE = 3
"""The status of what cannot begin because the database is away."""


def nobody_falls_by_itself(history: History, cases: Mapping[str, Case]) -> Found:
    """A worker or server ends when it is told to. What falls is started again here, which would hide it."""
    struck = {fault.target for fault in history.faults if fault.kind in STRUCK}
    for fall in history.falls:
        if fall.part not in struck and fall.status != NO_DATABASE:
            yield fall.part, f"{fall.part} ended by itself, with {fall.status}"


RULES = (nobody_falls_by_itself,)
