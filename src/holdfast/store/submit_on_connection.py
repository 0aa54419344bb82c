"""Accept a batch on the caller's SQLite connection, and leave that connection's settings as they were.

If a transaction is open, the call joins it, and a savepoint makes the call all or nothing. If none is open, the call
does what a single INSERT would do there: begin one and leave it open (Python's default), or be committed by itself
when it returns (`isolation_level=None`, `autocommit=True`).
"""

import contextlib
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from holdfast.errors import Conflict, StoreError
from holdfast.store import queries
from holdfast.store.database import Row
from holdfast.store.error_mapping import id_taken
from holdfast.store.sqlite_connection import Statements
from holdfast.store.submit_sqlite import submit_batch
from holdfast.submission import Batch
from holdfast.timing import SystemClock, to_micros

# Changes nothing, but takes the write lock, and waits for it. Reading first would pin a snapshot, and the lock could
# then be refused at once (SQLITE_BUSY_SNAPSHOT) instead of waited for. Python begins its implicit transaction here.
LOCK = "UPDATE jobs SET id = id WHERE 0"

_named = cache(lambda: queries.load("sqlite"))


def submit_on_connection(connection: Any, settings: Any, batch: Batch) -> Sequence[Row]:
    """Write a batch on the caller's connection; return the jobs that exist already.

    `connection` executes. `settings` has the row and text factories and says whether a transaction is open: the same
    object, or the one inside a wrapper.
    """
    with _plain_rows(settings):
        cursor = connection.cursor()
        statements = Statements(_Clocked(cursor))

        def run(name: str, **values: Any) -> Sequence[Row]:
            return statements.run(_named()[name], values)

        try:
            with _all_or_nothing(cursor, settings):
                return submit_batch(run, batch)
        except Exception as error:
            if _is(error, "sqlite3.IntegrityError"):
                taken = run("existing_jobs", ids=list(batch.ids))
                raise (id_taken(taken[0]["id"]) if taken else Conflict(f"refused by the database: {error}")) from error
            if _is(error, "sqlite3.OperationalError") and "no such table" in str(error):
                raise StoreError(f"{error}: run `holdfast migrate`") from error
            raise
        finally:
            cursor.close()


@contextlib.contextmanager
def _all_or_nothing(cursor: Any, settings: Any) -> Iterator[None]:
    alone = not settings.in_transaction
    undo = ["ROLLBACK"] if alone else []  # It contains no work of the caller.
    try:
        cursor.execute(LOCK)
        cursor.execute("SAVEPOINT holdfast_submit")
        undo = undo or ["ROLLBACK TO holdfast_submit", "RELEASE holdfast_submit"]
        cursor.execute(LOCK)
        yield
        cursor.execute("RELEASE holdfast_submit")
    except BaseException:
        for statement in undo if settings.in_transaction else ():
            cursor.execute(statement)
        raise


@contextlib.contextmanager
def _plain_rows(settings: Any) -> Iterator[None]:
    """Read text as str and rows as tuples, whatever factories the caller has set."""
    row_factory, text_factory = settings.row_factory, settings.text_factory
    settings.row_factory, settings.text_factory = None, str
    try:
        yield
    finally:
        settings.row_factory, settings.text_factory = row_factory, text_factory


class _Clocked:
    """A cursor on which `clock()` is a value: registering the function would leave it on the caller's connection."""

    def __init__(self, cursor: Any) -> None:
        self._cursor = cursor
        self._now = to_micros(SystemClock().now())

    def execute(self, text: str, values: dict[str, Any]) -> Any:
        self._cursor.execute(text.replace("clock()", ":clock"), {**values, "clock": self._now})
        return self._cursor

    def executemany(self, text: str, rows: Sequence[tuple[Any, ...]]) -> None:
        self._cursor.executemany(text.replace("clock()", str(self._now)), rows)


def _is(error: BaseException, name: str) -> bool:
    return any(f"{base.__module__}.{base.__name__}" == name for base in type(error).__mro__)
