"""Named statements from the SQL files (`sql_entries`), as the drivers take them.

On Postgres an entry is one statement. On SQLite it may be several: they run in one transaction, and the last one
returns the rows. Directives, only for SQLite: `-- precheck` before a SELECT that runs first, without the write lock
(no row: nothing to do); `-- each: rows` before a statement that runs once per element of `:rows`, with its fields by
position (`-- each: rows with x`: only for elements that have x); `-- as json` before a SELECT whose rows are returned
as one JSON text, an array of arrays.

An entry that moves jobs says which: on Postgres in a CTE `moves`, on SQLite in a SELECT after `-- moves`, with the
columns that `on_move.sql` lists. Each entry of that file subscribes to all of them: it is added to their text here. So
it runs in their transaction, and without a subscriber it costs nothing: Postgres does not run a CTE that nothing reads,
and SQLite never gets the SELECT.

Two forms of parameters, only for Postgres: `:rows AS r(id uuid, token bigint)` is a table, sent as one array per
column, each in Postgres' own text, and `:names::text[]` is an array. Every other list is sent as JSON.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from holdfast.store.sql_entries import Dialect, subscriber_texts, texts

DEFAULT_SCHEMA = "holdfast"

_PARAMETER = re.compile(r"(?<![:\w]):([a-z_]+)\b")
_TABLE = re.compile(r"(?<![:\w]):([a-z_]+) AS (\w+)\(([^)]+)\)")
_ARRAY = re.compile(r"(?<![:\w]):([a-z_]+)::text\[\]")
_COMMENT = re.compile(r"--[^\n]*")
_AS_JSON = re.compile(r"^-- as json$", re.MULTILINE)
_MOVES = re.compile(r"^-- moves$", re.MULTILINE)
_MOVES_CTE = re.compile(r"\bmoves AS \(\n.*?\n *\)", re.DOTALL)
"""On Postgres; its closing parenthesis is alone on a line."""


@dataclass(frozen=True)
class Statement:
    text: str
    parameters: tuple[str, ...]
    is_precheck: bool = False
    each: str | None = None
    having: str | None = None
    columns: tuple[str, ...] = ()
    """The names of the elements, where the rows are returned as JSON."""


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
    """Return all statements of a dialect, with what subscribes to moves of jobs."""
    added = subscribers(dialect)
    return {name: parse(name, text, added) for name, text in texts(dialect).items()}


def subscribers(dialect: Dialect) -> tuple[str, ...]:
    """Return the statements that run whenever jobs move, in the same transaction."""
    found = [parse(name, text) for name, text in subscriber_texts(dialect).items()]
    return tuple(statement.text for query in found for statement in query.statements)


def parse(name: str, text: str, added: Sequence[str] = ()) -> NamedQuery:
    """Read the text of an entry. The statements in `added` subscribe to the moves of jobs."""
    return NamedQuery(name, _statements(text, added))


def check_fields(name: str, kind: type, columns: tuple[str, ...]) -> None:
    """Refuse a struct whose fields are not the columns of a statement: it is filled in their order."""
    fields: tuple[str, ...] = kind.__struct_fields__  # type: ignore[attr-defined]
    if columns != fields[: len(columns)]:
        raise ValueError(f"{name} returns {', '.join(columns)}; {kind.__name__} has {', '.join(fields)}")


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


def _statements(body: str, added: Sequence[str]) -> tuple[Statement, ...]:
    found = []
    for piece in re.split(r";[ \t]*(?:\n|$)", body):
        written = _COMMENT.sub("", piece).strip()
        for text in with_subscribers(written, added, is_moves=_MOVES.search(piece) is not None) if written else ():
            each = re.search(r"^-- each: (\w+)(?: with (\w+))?$", piece, re.MULTILINE)
            is_precheck = re.search(r"^-- precheck$", piece, re.MULTILINE) is not None
            names = tuple(_PARAMETER.findall(text))
            bound = _PARAMETER.sub("?", text) if each else text
            bound, columns = _as_json(bound) if _AS_JSON.search(piece) else (bound, ())
            found.append(
                Statement(
                    bound,
                    names if each else tuple(dict.fromkeys(names)),
                    is_precheck,
                    each and each[1],
                    each and each[2],
                    columns,
                )
            )
    return tuple(found)


def _as_json(text: str) -> tuple[str, tuple[str, ...]]:
    """Make a SELECT return its rows as one JSON text; return the names of the columns, too."""
    pieces, depth, start = [], 0, len("SELECT ")
    for n in range(start, len(text)):
        depth += (text[n] == "(") - (text[n] == ")")
        if not depth and (text[n] == "," or text.startswith("\nFROM ", n)):
            pieces.append(text[start:n].strip())
            start = n + 1
            if text[n] != ",":
                break
    columns = [re.fullmatch(r"(.*?)(?: AS (\w+))?", piece, re.DOTALL) for piece in pieces]
    values = ", ".join(column[1] for column in columns if column)
    names = tuple(column[2] or column[1].rpartition(".")[2] for column in columns if column)
    return f"SELECT json_group_array(json_array({values})) AS found\n{text[start:]}", names


def with_subscribers(text: str, added: Sequence[str], *, is_moves: bool = False) -> list[str]:
    """Return the statements to run instead of one: what subscribes to its moves is added, as a CTE or as statements."""
    if is_moves:
        return [f"WITH moves AS (\n{text}\n)\n{one}" for one in added]
    if (moves := _MOVES_CTE.search(text)) is None or not added:
        return [text]
    ctes = "".join(f", subscriber_{n} AS (\n{one}\n)" for n, one in enumerate(added))
    return [f"{text[: moves.end()]}{ctes}{text[moves.end() :]}"]
