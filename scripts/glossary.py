"""Keep to one word per concept: `make check` runs this, and docs/glossary.md says which words those are.

A module is not named by a word that the glossary replaced, and no sentence uses a phrase that a reader has to puzzle
over. `KNOWN` lists the files that still do, each with how often: a file may only get better.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "torture", "bench", "scripts", "model", "docs", "examples")
SUFFIXES = (".py", ".md", ".sql", ".c", ".h", ".pml")
SELF = ("scripts/glossary.py", "tests/project/test_glossary.py", "docs/glossary.md")
MODULES = {
    "desk", "speech", "taking", "course", "ledger", "staging", "journal", "completer", "shipper", "chores",
    "heart", "words", "views", "shapes", "losses", "accept", "guest", "inside", "moves", "refusals", "wake",
    "space", "host", "removing", "children", "turns", "recipe", "spaces", "leading", "hub", "plans", "care",
    "talk", "ending", "tales", "stage", "rig", "fleet", "racers", "scenario", "callers",
}  # fmt: skip
"""Names that modules had, and that nobody could guess."""
PHRASES = {
    r"whoever": "name the one who acts, such as the worker or the caller",
    r"anew": "again",
    r"so long": "until, or while",
    r"twice is once": "idempotent",
    r"told a second time": "second signal",
    r"feared lost": "possibly lost",
    r"behind the last": "past the last",
    r"never heard of": "does not know",
    r"is the tool's to say": "is set by the tool",
    r"makes none of it": "say what is not made",
    r"hungry": "may have work",
}
"""Phrases as regular expressions, each with what to write instead."""
KNOWN: Mapping[str, int] = {
    "src/holdfast/store/migrations/postgres/0001_core.sql": 1,
    "src/holdfast/store/migrations/postgres/0003_lists.sql": 1,
}


def problems(texts: Iterable[tuple[str, str]], known: Mapping[str, int]) -> Iterator[str]:
    """Yield what to change in these files, each a path and its text; and what `known` need not list any more."""
    counts: Counter[str] = Counter()
    found: dict[str, list[str]] = {}
    for path, text in texts:
        if Path(path).suffix == ".py" and Path(path).stem in MODULES:
            yield f"{path}: `{Path(path).stem}` is not a name for a module; see docs/glossary.md"
        for n, line in enumerate(text.splitlines(), 1):
            for phrase, better in PHRASES.items():
                if re.search(rf"\b{phrase}\b", line, re.IGNORECASE):
                    counts[path] += 1
                    found.setdefault(path, []).append(f"{path}:{n}: {phrase!r} reads oddly; write: {better}")
    for path, lines in found.items():
        if counts[path] > known.get(path, 0):
            yield from lines
    for path, count in known.items():
        if counts[path] < count:
            yield f"{path} has {counts[path]} such phrases, and KNOWN in scripts/glossary.py says {count}: lower it"


def read(root: Path) -> Iterator[tuple[str, str]]:
    paths = [*root.glob("*.md"), *(path for folder in FOLDERS for path in (root / folder).rglob("*"))]
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        if path.suffix in SUFFIXES and name not in SELF and path.is_file():
            yield name, path.read_text()


def main() -> None:
    found = list(problems(read(ROOT), KNOWN))
    sys.stdout.writelines(f"{problem}\n" for problem in found)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
