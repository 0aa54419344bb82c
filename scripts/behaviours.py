"""Keep `docs/behaviours.md` and the tests in agreement.

A row of the page has an id, a behaviour, a check and the tests that prove it. The first three are written by hand. A
test names the rows that it proves in its docstring: `Proves L4, J2-J5.` From that `make docs` writes the last column,
except where it says `open: …`, with the reason why no test proves the row yet. `make check` fails when page and tests
disagree.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "behaviours.md"
TESTS = ROOT / "tests"

ID = r"[A-Z]\d+"
RANGE = rf"{ID}(?:\s*[-–]\s*[A-Z]?\d+)*"
IDS = rf"{RANGE}(?:(?:,\s*|[,;]?\s+and\s+){RANGE}\b)*"
PROVES = re.compile(rf"\bProves\s+({IDS})")
UNREADABLE = re.compile(rf"\A{IDS}[.:,;]|\bProves\b(?!\s+{ID})")
ROW = re.compile(rf"\| ({ID}) \|.*\|")
OPEN = re.compile(r"open: \S")
NAMED_TESTS = 3
NAMED_FILES = 6


@dataclass(frozen=True, slots=True)
class Proof:
    """A test function, and the rows that its docstring names. `unreadable`: ids without `Proves`, or the reverse."""

    file: str
    name: str
    rows: tuple[str, ...] = ()
    unreadable: bool = False

    def __str__(self) -> str:
        return f"{self.file}::{self.name}"


# The tests


def read_tests(folder: Path) -> list[Proof]:
    return [
        test
        for path in sorted(folder.rglob("test_*.py"))
        for test in parse(path.relative_to(folder).as_posix(), path.read_text())
    ]


def parse(file: str, source: str) -> Iterator[Proof]:
    """Parse the tests of a module, without importing it."""
    for name, function in _functions(ast.parse(source, file).body):
        text = ast.get_docstring(function) or ""
        rows = dict.fromkeys(row for ids in PROVES.findall(text) for row in expand(ids))
        yield Proof(file, name, tuple(rows), unreadable=UNREADABLE.search(text) is not None)


def _functions(
    body: Iterable[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}::")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield f"{prefix}{node.name}", node


def expand(ids: str) -> Iterator[str]:
    """Return the ids of `L4, J2-J5`. A range that makes no sense stays as it is: no row has that id."""
    for part in re.findall(RANGE, ids):
        ends = re.fullmatch(r"([A-Z])(\d+)\s*[-–]\s*\1(\d+)", part)
        if ends is None or int(ends[2]) >= int(ends[3]):
            yield part
        else:
            yield from (f"{ends[1]}{number}" for number in range(int(ends[2]), int(ends[3]) + 1))


# The page


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1]]


def by_row(tests: Iterable[Proof]) -> Mapping[str, Sequence[Proof]]:
    found: dict[str, list[Proof]] = {}
    for test in tests:
        for row in test.rows:
            found.setdefault(row, []).append(test)
    return found


def last_cell(tests: Sequence[Proof]) -> str:
    """Return the text of the last column: tests by name if they are few, else files with their numbers of tests."""
    if len(tests) <= NAMED_TESTS:
        return ", ".join(f"`{test}`" for test in tests)
    files = sorted(Counter(test.file for test in tests).items(), key=lambda item: (-item[1], item[0]))
    named, others = files[:NAMED_FILES], files[NAMED_FILES:]
    text = ", ".join(f"`{file}` ({count})" for file, count in named)
    return f"{text} and {sum(count for _, count in others)} in other files" if others else text


def written(page: str, tests: Iterable[Proof]) -> str:
    """Return the page with a current last column. Cells that say `open` are left alone."""
    proven = by_row(tests)
    lines = page.split("\n")
    for number, line in enumerate(lines):
        found = ROW.fullmatch(line)
        if found is not None and len(cells(line)) == 4 and not OPEN.match(cells(line)[3]):
            first = [*cells(line)[:3], last_cell(proven.get(found[1], ()))]
            lines[number] = f"| {' | '.join(first)} |"
    return "\n".join(lines)


# The check


def problems(page: str, tests: Sequence[Proof]) -> Iterator[str]:
    rows = [cells(line) for line in page.splitlines() if ROW.fullmatch(line)]
    proven = by_row(tests)
    counts = Counter(row[0] for row in rows)
    for test in tests:
        if test.unreadable:
            yield f"{test}: the docstring names rows in another form. Write `Proves L4, J2-J5.`, or avoid the word."
        for id in test.rows:
            if id not in counts:
                yield f"{test} proves {id}, but docs/behaviours.md has no such row. Correct the id, or add the row."
    for id, count in counts.items():
        if count > 1:
            yield f"{id} has {count} rows in docs/behaviours.md. Give each row an id of its own."
    for row in rows:
        if len(row) != 4:
            yield f"{row[0]}: the row has {len(row)} cells. Write id, behaviour, check, tests; write a bar as `\\|`."
            continue
        id, _, _, last = row
        if OPEN.match(last) and id in proven:
            yield f"{id} is marked open, but {proven[id][0]} proves it. Clear the last cell and run `make docs`."
        elif not OPEN.match(last) and id not in proven:
            yield f"{id}: no test proves it. Write `Proves {id}.` in a docstring, or `open: why` in the last cell."
    if page != written(page, tests):
        yield "docs/behaviours.md does not name the tests as they are now. Run `make docs`."


def main(arguments: Sequence[str]) -> int:
    tests = read_tests(TESTS)
    page = PAGE.read_text()
    if "--check" not in arguments:
        PAGE.write_text(written(page, tests))
        sys.stdout.write(f"{PAGE.relative_to(ROOT)}\n")
        return 0
    found = list(problems(page, tests))
    sys.stderr.writelines(f"{problem}\n" for problem in found)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
