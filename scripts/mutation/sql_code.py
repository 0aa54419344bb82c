"""The mutants of a file of named SQL statements, found in its tokens.

Comparisons, conjuncts, NULL tests, NOT, `+ 1`, flags, statuses, and assignments of an UPDATE. Locks are not touched:
only a race could tell.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from scripts.mutation.mutant import Edit, Mutant, numbered, squeezed

from holdfast.model import Status
from holdfast.store.sql_entries import including

TOKEN = re.compile(
    r"(?P<comment>--[^\n]*|/\*.*?\*/)|(?P<text>'(?:[^']|'')*')|(?P<number>\b\d+(?:\.\d+)?\b)|(?P<word>::?\w+|[A-Za-z_]\w*)"
    r"|(?P<operator>->>|->|<=|>=|<>|!=|\|\||@>|<@|=>|[-=<>+*/(),;.\[\]%?&|#])"
)
NAME = re.compile(r"^-- (name|fragment): (\w+)\n", re.MULTILINE)
PART = re.compile(r"^-- (sqlite|sqlite precheck|postgres only)\n", re.MULTILINE)
COMPARISONS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "=": "<>", "<>": "="}
STATUSES = [f"'{status.value}'" for status in Status]
FLIPS = {"true": "false", "false": "true", "TRUE": "FALSE", "FALSE": "TRUE", "0": "1", "1": "0"}
CONJUNCT_ENDS = {
    "AND", "OR", "ORDER", "GROUP", "LIMIT", "RETURNING", "UNION", "FOR", "HAVING", "WHERE", "FROM", "ON", "SET", "WHEN",
    "THEN", "ELSE", "END", "WINDOW", "OFFSET", "EXCEPT", "DO", "JOIN", "CROSS", "LEFT", "VALUES", "AS", ",", ";",
}  # fmt: skip
ASSIGNMENT_ENDS = {"WHERE", "FROM", "RETURNING", ";"}


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    start: int
    end: int
    depth: int


def mutants(path: str, source: bytes) -> list[Mutant]:
    """List every mutant of a file, in the order of the text."""
    text = source.decode()
    names = list(NAME.finditer(text))
    found: list[Mutant] = []
    for name, following in zip(names, [*names[1:], None], strict=False):
        end = following.start() if following else len(text)
        found += _of_entry(path, text, (name[1], name[2]), name.end(), end)
    return numbered(sorted(found, key=lambda mutant: (mutant.edit.start, mutant.edit.end, mutant.edit.text)))


def dialect_of(where: str) -> str | None:
    """Return the dialect of a mutated place; None if both run it."""
    found = re.search(r"\((postgres|sqlite)\)$", where)
    return found and found[1]


def units_of(unit: str) -> list[str]:
    """Return the statements whose tests execute a unit: those that include a fragment, or the statement itself."""
    kind, _, name = unit.partition(":")
    return [f"sql:{entry}" for entry in including(name)] if kind == "fragment" else [unit]


def _places(text: str) -> Iterator[tuple[str, int, int]]:
    """The texts of an entry, by whose they are."""
    marks = list(PART.finditer(text))
    alone = [mark for mark in marks if mark[1] != "sqlite precheck"]
    yield "postgres" if alone else "both", 0, marks[0].start() if marks else len(text)
    for mark, following in zip(marks, [*marks[1:], None], strict=False):
        whose = "postgres" if mark[1] == "postgres only" else "sqlite"
        yield whose, mark.end(), following.start() if following else len(text)


def _of_entry(path: str, text: str, named: tuple[str, str], start: int, end: int) -> Iterator[Mutant]:
    kind, name = named
    unit = f"sql:{name}" if kind == "name" else f"fragment:{name}"
    for whose, first, last in _places(text[start:end]):
        yield from _of_text(path, text, (f"{name} ({whose})", unit), start + first, start + last)


def _of_text(path: str, text: str, named: tuple[str, str], start: int, end: int) -> Iterator[Mutant]:
    where, unit = named
    for begin, stop, new in _edits(_tokens(text[start:end])):
        first = text.rfind("\n", 0, start + begin) + 1
        last = text.find("\n", start + stop)
        old = text[first:last]
        after = text[first : start + begin] + new + text[start + stop : last]
        edit = Edit(len(text[: start + begin].encode()), len(text[: start + stop].encode()), new)
        line = text.count("\n", 0, start + begin) + 1
        change = f"`{squeezed(old)}` → `{squeezed(after)}`" if after.strip() else f"`{squeezed(old)}` removed"
        yield Mutant(path, where, change, line, unit, edit)


def _tokens(text: str) -> list[Token]:
    found, depth = [], 0
    for match in TOKEN.finditer(text):
        kind = match.lastgroup or ""
        if kind == "comment":
            continue
        depth -= match.group() == ")"
        found.append(Token(kind, match.group(), match.start(), match.end(), depth))
        depth += match.group() == "("
    return found


def _edits(tokens: list[Token]) -> Iterator[tuple[int, int, str]]:
    assigned: set[int] = set()
    for n, token in enumerate(tokens):
        if token.text == "SET":
            items = _assignments(tokens, n + 1)
            assigned.update(item[1].start for item in items if len(item) > 1)
            yield from _without_one(items)
    for n, token in enumerate(tokens):
        before = tokens[n - 1] if n else None
        after = tokens[n + 1] if n + 1 < len(tokens) else None
        if token.text in COMPARISONS and token.start not in assigned:
            yield token.start, token.end, COMPARISONS[token.text]
        elif token.text in STATUSES:
            yield token.start, token.end, STATUSES[(STATUSES.index(token.text) + 1) % len(STATUSES)]
        elif token.text in FLIPS and before and before.text not in {"SELECT", "+", "-", "[", ".", "THEN", "ELSE"}:
            yield token.start, token.end, FLIPS[token.text]
        elif token.text in {"+", "-"} and before and after and after.kind == "number" and before.kind != "operator":
            yield token.start, after.end, ""
        elif token.text in {"AND", "OR", "WHERE", "NOT", "NULL"}:
            yield from KEYWORDS[token.text](tokens, n)


def _conjunct(tokens: list[Token], n: int) -> Iterator[tuple[int, int, str]]:
    """Leave out what follows an AND."""
    if not _is_between(tokens, n):
        yield tokens[n].start, tokens[_end(tokens, n + 1, tokens[n].depth) - 1].end, ""


def _first_conjunct(tokens: list[Token], n: int) -> Iterator[tuple[int, int, str]]:
    """Leave out what stands between WHERE and the first AND."""
    end = _end(tokens, n + 1, tokens[n].depth)
    if end + 1 < len(tokens) and tokens[end].text == "AND" and not _is_between(tokens, end):
        yield tokens[n + 1].start, tokens[end + 1].start, ""


def _and_for_or(tokens: list[Token], n: int) -> Iterator[tuple[int, int, str]]:
    yield tokens[n].start, tokens[n].end, "AND"


def _without_not(tokens: list[Token], n: int) -> Iterator[tuple[int, int, str]]:
    if n + 1 < len(tokens) and tokens[n + 1].text not in {"MATERIALIZED", "INDEXED", "MATCHED"}:
        yield tokens[n].start, tokens[n + 1].start, ""


def _null_test(tokens: list[Token], n: int) -> Iterator[tuple[int, int, str]]:
    if n and tokens[n - 1].text == "IS":
        yield tokens[n].start, tokens[n].end, "NOT NULL"


KEYWORDS: dict[str, Callable[[list[Token], int], Iterator[tuple[int, int, str]]]] = {
    "AND": _conjunct,
    "OR": _and_for_or,
    "WHERE": _first_conjunct,
    "NOT": _without_not,
    "NULL": _null_test,
}


def _end(tokens: list[Token], n: int, depth: int) -> int:
    """The index of the token that ends the condition which begins at n."""
    while n < len(tokens):
        token = tokens[n]
        distinct = token.text == "FROM" and tokens[n - 1].text == "DISTINCT"
        if token.depth < depth or (token.depth == depth and token.text in CONJUNCT_ENDS and not distinct):
            return n
        if token.depth == depth and token.text == "CASE":
            n = _after_case(tokens, n)
        n += 1
    return n


def _after_case(tokens: list[Token], n: int) -> int:
    """The index of the END of a CASE."""
    nested = 0
    for m in range(n, len(tokens)):
        nested += (tokens[m].text == "CASE") - (tokens[m].text == "END")
        if not nested:
            return m
    return len(tokens) - 1


def _is_between(tokens: list[Token], n: int) -> bool:
    """Whether the AND at n belongs to a BETWEEN."""
    for token in reversed(tokens[:n]):
        if token.depth < tokens[n].depth or token.text in {"AND", "OR", "WHERE", ";"}:
            return False
        if token.depth == tokens[n].depth and token.text == "BETWEEN":
            return True
    return False


def _assignments(tokens: list[Token], n: int) -> list[list[Token]]:
    """The tokens of each assignment in a SET list that begins at n."""
    items: list[list[Token]] = [[]]
    depth = tokens[n].depth
    for m in range(n, len(tokens)):
        token = tokens[m]
        distinct = token.text == "FROM" and tokens[m - 1].text == "DISTINCT"
        if token.depth < depth or (token.depth == depth and token.text in ASSIGNMENT_ENDS and not distinct):
            break
        if token.depth == depth and token.text == ",":
            items.append([])
        else:
            items[-1].append(token)
    return [item for item in items if item]


def _without_one(items: list[list[Token]]) -> Iterator[tuple[int, int, str]]:
    """Leave out one assignment of several."""
    for n, item in enumerate(items):
        if n:
            yield items[n - 1][-1].end, item[-1].end, ""
        elif len(items) > 1:
            yield item[0].start, items[1][0].start, ""
