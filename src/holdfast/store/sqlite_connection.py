"""One SQLite connection: its pragmas and functions, and named statements with their parameters and rows.

No threads and no transactions here: `sqlite` runs a connection in its own thread.
"""

import hashlib
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from operator import getitem
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from holdfast import decoding
from holdfast.store import queries
from holdfast.store.database import Row, json_text, tuples
from holdfast.store.sql_entries import session_script
from holdfast.timing import Clock, from_micros, to_micros

T = TypeVar("T")

BUSY_SECONDS = 30.0
CACHE_KIB = 65_536
_PLAIN = frozenset({str, int, float, bool, type(None)})


class Statements:
    """Runs named statements on our own connection or on the caller's."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self._shapes: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}

    def run(self, query: queries.NamedQuery, parameters: Mapping[str, Any]) -> list[Row]:
        """Run the statements of a query except its precheck; return the rows of the last one."""
        plain = {name: _value(parameters[name]) for name in query.values}
        rows: list[Row] = []
        for statement in query.statements:
            if statement.each is not None:
                self.raw.executemany(statement.text, _records(parameters[statement.each], statement))
            elif not statement.is_precheck:
                rows = self._fetch(statement, plain)
        return rows

    def values(self, query: queries.NamedQuery, kind: type[T], parameters: Mapping[str, Any]) -> list[T]:
        """Run a query whose last statement returns one JSON text, and whose columns are the fields of a struct.

        Each row that Python fetches releases the GIL once and creates an object per column. This releases it once in
        all, and the decoder creates the structs directly (measured: 2 µs a row instead of 8).
        """
        queries.check_fields(query.name, kind, query.statements[-1].columns)
        (row,) = self.run(query, parameters)
        (text,) = row.values()
        found: list[T] = decoding.decoder(list[kind], strict=False).decode(text)  # type: ignore[valid-type]
        return found

    def passes_precheck(self, query: queries.NamedQuery, parameters: Mapping[str, Any]) -> bool:
        """Return whether there is anything to do, without taking a lock."""
        plain = {name: _value(parameters[name]) for name in query.values}
        return all(self._fetch(statement, plain) for statement in query.statements if statement.is_precheck)

    def _fetch(self, statement: queries.Statement, plain: Mapping[str, Any]) -> list[Row]:
        cursor = self.raw.execute(statement.text, {name: plain[name] for name in statement.parameters})
        if cursor.description is None:
            return []
        found = cursor.fetchall()
        if not found:
            return []
        shape = self._shapes.get(statement.text)
        if shape is None:
            names = tuple(column[0] for column in cursor.description)
            shape = self._shapes[statement.text] = (names, tuple(name for name in names if name.endswith("_at")))
        names, times = shape
        rows: list[dict[str, Any]] = [dict(zip(names, values, strict=True)) for values in found]
        for row in rows:
            for name in times:
                if row[name] is not None:
                    row[name] = from_micros(row[name])
        return list(rows)


class Connection(Statements):
    """One SQLite connection and the clock that its statements see."""

    def __init__(self, path: Path, clock: Clock, *, writes: bool) -> None:
        super().__init__(
            sqlite3.connect(
                path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False, cached_statements=512
            )
        )
        self._clock = clock
        self._now = [0]
        # A builtin: a Python function would cost an interpreter frame per row.
        now: Callable[[], int] = partial(getitem, self._now, 0)  # type: ignore[assignment]
        self.raw.create_function("clock", 0, now, deterministic=True)
        self.raw.execute("PRAGMA synchronous = FULL")
        self.raw.execute("PRAGMA temp_store = MEMORY")
        self.raw.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        if writes:
            use_wal(self.raw)
            self.raw.create_function("signature", 4, _signature, deterministic=True)
            self.raw.executescript(session_script())
        else:
            self.raw.execute("PRAGMA query_only = ON")

    def tick(self) -> None:
        """Update the clock of this connection; called once per transaction."""
        self._now[0] = to_micros(self._clock.now())


def try_wal(path: Path) -> None:
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS)
    try:
        use_wal(connection)
    finally:
        connection.close()


def use_wal(connection: sqlite3.Connection) -> None:
    """Switch the file to WAL. When several connections do so at once, SQLite refuses some without waiting: retry."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _signature(kind: str, runner: str, spec: str, inputs: str) -> str:
    """Return the signature of a job, which does not depend on the order of keys."""
    parts = (kind, runner, msgspec.json.decode(spec), msgspec.json.decode(inputs))
    return hashlib.md5(msgspec.json.encode(parts, order="deterministic"), usedforsecurity=False).hexdigest()


def _value(value: Any) -> Any:
    if isinstance(value, datetime):
        return to_micros(value)
    if isinstance(value, list | tuple | dict):
        return json_text(value)
    return value


def _records(rows: Sequence[Any], statement: queries.Statement) -> list[tuple[Any, ...]]:
    if statement.having is not None:
        rows = [row for row in rows if getattr(row, statement.having)]
    columns = list(zip(*tuples(rows, statement.parameters), strict=True))
    for n, column in enumerate(columns):
        if not _PLAIN.issuperset(map(type, column)):
            columns[n] = tuple(map(_value, column))
    return list(zip(*columns, strict=True))
