"""Named statements from the SQL files.

A file holds entries that start with `-- name: x`. On Postgres an entry is one statement. On SQLite it may be several:
they run in one transaction and the last one answers. Two marks, for SQLite alone: `-- look` before a SELECT that runs
first, without the write lock (no row: nothing to do); `-- each: rows` before a statement that runs once per element of
`:rows`, with its fields by position.
"""

import re
from dataclasses import dataclass
from importlib import resources
from typing import Literal

Dialect = Literal["postgres", "sqlite"]
DEFAULT_SCHEMA = "holdfast"

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)\b")
_COMMENT = re.compile(r"--[^\n]*")


@dataclass(frozen=True)
class Statement:
    text: str
    parameters: tuple[str, ...]
    look: bool = False
    each: str | None = None


@dataclass(frozen=True)
class Query:
    name: str
    statements: tuple[Statement, ...]

    @property
    def looks(self) -> bool:
        return any(statement.look for statement in self.statements)

    @property
    def parameters(self) -> frozenset[str]:
        """What the caller gives; the fields of an `each` row are not among them."""
        names: set[str] = set()
        for statement in self.statements:
            names.update([statement.each] if statement.each else statement.parameters)
        return frozenset(names)


def load(dialect: Dialect) -> dict[str, Query]:
    """Read all entries of a dialect."""
    queries: dict[str, Query] = {}
    for file in sorted(_folder(dialect).iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".sql") and file.name != "session.sql":
            for query in parse(file.read_text()):
                if query.name in queries:
                    raise ValueError(f"statement {query.name} is defined twice; the second is in {file.name}")
                queries[query.name] = query
    return queries


def session_script(dialect: Dialect) -> str:
    return (_folder(dialect) / "session.sql").read_text()


def parse(text: str) -> list[Query]:
    parts = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
    return [Query(name, _statements(body)) for name, body in zip(parts[1::2], parts[2::2], strict=True)]


def positional(text: str) -> tuple[str, tuple[str, ...]]:
    """Turn `:name` into `$1`, `$2` … and return the names in that order."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        if match.group(1) not in names:
            names.append(match.group(1))
        return f"${names.index(match.group(1)) + 1}"

    return _PARAMETER.sub(number, text), tuple(names)


def in_schema(text: str, schema: str) -> str:
    """Put another schema's name into SQL that is written for the schema `holdfast`."""
    return re.sub(r"\bholdfast\.(?=\w)", f"{schema}.", text).replace("'holdfast'", f"'{schema}'")


def _statements(body: str) -> tuple[Statement, ...]:
    found = []
    for piece in re.split(r";[ \t]*(?:\n|$)", body):
        text = _COMMENT.sub("", piece).strip()
        if text:
            each = re.search(r"^-- each: (\w+)$", piece, re.MULTILINE)
            look = re.search(r"^-- look$", piece, re.MULTILINE) is not None
            names = tuple(dict.fromkeys(_PARAMETER.findall(text)))
            if each:
                text = _by_position(text, names)
            found.append(Statement(text, names, look, each.group(1) if each else None))
    return tuple(found)


def _by_position(text: str, names: tuple[str, ...]) -> str:
    return _PARAMETER.sub(lambda match: f"?{names.index(match.group(1)) + 1}", text)


def _folder(dialect: Dialect) -> resources.abc.Traversable:
    return resources.files("holdfast.store") / "sql" / dialect
