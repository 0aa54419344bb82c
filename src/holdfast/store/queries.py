"""Named statements from the SQL files.

A file holds entries that start with `-- name: x`. On Postgres an entry is one statement. On SQLite it may be several:
they run in one transaction, and the last one returns the rows. Two directives, only for SQLite: `-- precheck` before a
SELECT that runs first, without the write lock (no row: nothing to do); `-- each: rows` before a statement that runs
once per element of `:rows`, with its fields by position (`-- each: rows with x`: only for elements that have x).

Two forms of parameters, only for Postgres: `:rows AS r(id uuid, token bigint)` is a table, sent as one array per
column, each in Postgres' own text, and `:names::text[]` is an array. Every other list is sent as JSON.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from typing import Literal

Dialect = Literal["postgres", "sqlite"]
DEFAULT_SCHEMA = "holdfast"

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)\b")
_TABLE = re.compile(r"(?<![:\w]):([a-z_]+) AS (\w+)\(([^)]+)\)")
_ARRAY = re.compile(r"(?<![:\w]):([a-z_]+)::text\[\]")
_COMMENT = re.compile(r"--[^\n]*")


@dataclass(frozen=True)
class Statement:
    text: str
    parameters: tuple[str, ...]
    is_precheck: bool = False
    each: str | None = None
    having: str | None = None


@dataclass(frozen=True)
class Slot:
    """What goes into `$n`: a value, an array, or one column of a table."""

    name: str
    column: str | None = None
    array: bool = False


@dataclass(frozen=True)
class NamedQuery:
    name: str
    statements: tuple[Statement, ...]

    @cached_property
    def has_precheck(self) -> bool:
        return any(statement.is_precheck for statement in self.statements)

    @cached_property
    def values(self) -> frozenset[str]:
        """The parameters that statements take as values, without those of tables."""
        return frozenset(name for s in self.statements if s.each is None for name in s.parameters)

    @cached_property
    def parameters(self) -> frozenset[str]:
        """The parameters that the caller gives, without the fields of an `each` row."""
        names: set[str] = set()
        for statement in self.statements:
            names.update([statement.each] if statement.each else statement.parameters)
        return frozenset(names)


def load(dialect: Dialect) -> dict[str, NamedQuery]:
    """Read all entries of a dialect."""
    queries: dict[str, NamedQuery] = {}
    for file in sorted(_folder(dialect).iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".sql") and file.name != "session.sql":
            for query in parse(file.read_text()):
                if query.name in queries:
                    raise ValueError(f"statement {query.name} is defined twice; the second is in {file.name}")
                queries[query.name] = query
    return queries


def session_script(dialect: Dialect) -> str:
    return (_folder(dialect) / "session.sql").read_text()


def parse(text: str) -> list[NamedQuery]:
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
    return [NamedQuery(name, _statements(body)) for name, body in zip(parts[1::2], parts[2::2], strict=True)]


def positional(text: str) -> tuple[str, tuple[Slot, ...]]:
    """Turn `:name` into `$1`, `$2` … and return what each stands for."""
    slots: list[Slot] = []

    def number(slot: Slot) -> str:
        if slot not in slots:
            slots.append(slot)
        return f"${slots.index(slot) + 1}"

    def table(match: re.Match[str]) -> str:
        name, alias, columns = match.groups()
        typed = [column.split() for column in columns.split(",")]
        arrays = [f"{number(Slot(name, column))}::text::{kind}[]" for column, kind in typed]
        return f"unnest({', '.join(arrays)}) AS {alias}({', '.join(column for column, _ in typed)})"

    text = _TABLE.sub(table, text)
    text = _ARRAY.sub(lambda match: f"{number(Slot(match.group(1), array=True))}::text[]", text)
    text = _PARAMETER.sub(lambda match: number(Slot(match.group(1))), text)
    return text, tuple(slots)


def in_schema(text: str, schema: str) -> str:
    """Put another schema's name into SQL that is written for the schema `holdfast`."""
    return re.sub(r"\bholdfast\.(?=\w)", f"{schema}.", text).replace("'holdfast'", f"'{schema}'")


def _statements(body: str) -> tuple[Statement, ...]:
    found = []
    for piece in re.split(r";[ \t]*(?:\n|$)", body):
        text = _COMMENT.sub("", piece).strip()
        if text:
            each = re.search(r"^-- each: (\w+)(?: with (\w+))?$", piece, re.MULTILINE)
            is_precheck = re.search(r"^-- precheck$", piece, re.MULTILINE) is not None
            names = tuple(_PARAMETER.findall(text))
            if each:
                text = _PARAMETER.sub("?", text)
            else:
                names = tuple(dict.fromkeys(names))
            found.append(Statement(text, names, is_precheck, *(each.groups() if each else ())))
    return tuple(found)


def _folder(dialect: Dialect) -> resources.abc.Traversable:
    return resources.files("holdfast.store") / "sql" / dialect
