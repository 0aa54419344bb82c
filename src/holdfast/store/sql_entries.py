"""The SQL files: one per noun, with both dialects' texts of an operation in one place.

An entry starts with `-- name: x`, comments, and its text in Postgres' SQL. Where SQLite's differs only in form, it is
made from that text (`sqlite_text`). Where it needs another shape, its own text follows in the same entry:

- `-- sqlite`: what SQLite runs instead; an entry without another text exists on SQLite only.
- `-- sqlite precheck`: what SQLite runs first, without the write lock (no row: nothing to do).
- `-- postgres only`: there is no such entry on SQLite.
- `/*sqlite … */` inside a text: words that only SQLite gets, such as `INDEXED BY`.

`-- fragment: x` names a text that entries of any file include as `{x}`: lists of columns, and what each move of a job
writes (`transitions.sql`). `python -m scripts.statements DIALECT [NAME …]` prints what a database gets.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from holdfast.store.move_rules import sql_values
from holdfast.store.sqlite_text import sqlite_text

Dialect = Literal["postgres", "sqlite"]

SESSION = "session.sql"
ON_MOVE = "on_move.sql"
_START = re.compile(r"^-- (name|fragment): (\w+)\n", re.MULTILINE)
_PART = re.compile(r"^-- (sqlite|sqlite precheck|postgres only)\n", re.MULTILINE)
_INCLUDED = re.compile(r"(?<!')\{(\w+)\}")
_SQLITE_WORDS = re.compile(r" ?/\*sqlite .*? \*/")
_HEADER = re.compile(r"(?:--(?! (?:each: |precheck$|moves$|as json$))[^\n]*\n)*", re.MULTILINE)


@dataclass(frozen=True)
class Entry:
    """One entry of a file, before fragments are included."""

    name: str
    file: str
    comment: str
    text: str
    """Postgres' text, and SQLite's where that has none of its own."""
    sqlite: str | None = None
    precheck: str | None = None
    postgres_only: bool = False

    def exists_on(self, dialect: Dialect) -> bool:
        return bool(self.text) if dialect == "postgres" else not self.postgres_only


def texts(dialect: Dialect) -> dict[str, str]:
    """Return the text of every entry of a dialect, with its comment and with fragments included."""
    return _texts(dialect, [entry for entry in entries() if entry.file != ON_MOVE])


def subscriber_texts(dialect: Dialect) -> dict[str, str]:
    """Return the texts that subscribe to moves of jobs."""
    return _texts(dialect, [entry for entry in entries() if entry.file == ON_MOVE])


def _texts(dialect: Dialect, chosen: Sequence[Entry]) -> dict[str, str]:
    found: dict[str, str] = {}
    for entry in chosen:
        if entry.exists_on(dialect):
            if entry.name in found:
                raise ValueError(f"statement {entry.name} is defined twice; the second is in {entry.file}")
            found[entry.name] = entry.comment + dialect_text(entry, dialect)
    return found


def dialect_text(entry: Entry, dialect: Dialect) -> str:
    """Return what a dialect runs for an entry."""
    if dialect == "postgres":
        return _SQLITE_WORDS.sub("", included(entry.text, fragments()))
    if entry.sqlite is not None:
        return included(entry.sqlite, sqlite_fragments())
    first = "" if entry.precheck is None else "-- precheck\n" + included(entry.precheck, sqlite_fragments())
    return first + sqlite_text(included(entry.text, fragments()))


@cache
def entries() -> tuple[Entry, ...]:
    """Read the entries of all files, in the order of their names."""
    return tuple(entry for name, text in _files() for entry in read_entries(name, text))


@cache
def fragments() -> Mapping[str, str]:
    """Read the fragments of all files, together with the values that the tables in Python name."""
    found = dict(sql_values())
    for file, text in _files():
        for kind, name, body in _pieces(text):
            if kind == "fragment":
                if name in found:
                    raise ValueError(f"fragment {name} is defined twice; the second is in {file}")
                found[name] = _HEADER.sub("", body, count=1).strip()
    return {name: included(text, found) for name, text in found.items()}


@cache
def sqlite_fragments() -> Mapping[str, str]:
    """Return the fragments in SQLite's form. Once per process: every start of one waits for this."""
    return {name: sqlite_text(text) for name, text in fragments().items()}


def including(fragment: str) -> list[str]:
    """Return the names of the entries that include a fragment, directly or in another one."""
    names = {fragment}
    pieces = [piece for _, text in _files() for piece in _pieces(text)]
    while (
        more := {name for kind, name, body in pieces if kind == "fragment" and names & set(_INCLUDED.findall(body))}
        - names
    ):
        names |= more
    return [name for kind, name, body in pieces if kind == "name" and names & set(_INCLUDED.findall(body))]


def read_entries(file: str, text: str) -> Iterator[Entry]:
    for kind, name, body in _pieces(text):
        if kind == "name":
            header = _HEADER.match(body)
            comment = "" if header is None else header[0]
            found = _PART.search(comment)
            comment = comment if found is None else comment[: found.start()]
            parts = _PART.split(body[len(comment) :])
            own = dict(zip(parts[1::2], (part.strip("\n") + "\n" for part in parts[2::2]), strict=True))
            alone = own.pop("postgres only", None)
            yield Entry(
                name,
                file,
                comment,
                (alone or parts[0]).strip("\n") + "\n" if alone or parts[0].strip() else "",
                own.get("sqlite"),
                own.get("sqlite precheck"),
                alone is not None,
            )


def included(text: str, known: Mapping[str, str]) -> str:
    """Put fragments in their places, each line below the first."""
    while (found := _INCLUDED.search(text)) is not None:
        if found[1] not in known:
            raise ValueError(f"there is no fragment {found[1]}")
        indent = "\n" + " " * (found.start() - text.rfind("\n", 0, found.start()) - 1)
        text = text[: found.start()] + known[found[1]].replace("\n", indent) + text[found.end() :]
    return text


def session_script() -> str:
    """Return what a new SQLite connection runs."""
    return (_folder() / SESSION).read_text()


def _pieces(text: str) -> Iterator[tuple[str, str, str]]:
    parts = _START.split(text)
    yield from zip(parts[1::3], parts[2::3], parts[3::3], strict=True)


def _files() -> Iterator[tuple[str, str]]:
    for file in sorted(_folder().iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".sql") and file.name != SESSION:
            yield file.name, file.read_text()


def _folder() -> resources.abc.Traversable:
    return resources.files("holdfast.store") / "sql"
