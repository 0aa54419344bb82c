"""Draw mutants: every file gets a share by its size, and a random generator of its own.

So a change in one file does not change what is drawn from the others, as long as the shares stay the same.
"""

import random
from collections.abc import Sequence
from pathlib import Path

from scripts.mutation import python_code, sql_code
from scripts.mutation.mutant import Mutant

FOLDERS = ("src/holdfast/store", "src/holdfast/worker")
LEFT_OUT = ("/migrations/", "session.sql")
"""Migrations are compared with dumped schemas; the session's script has no named statements."""


def files(root: Path) -> list[str]:
    """The paths that are mutated."""
    found = [path for folder in FOLDERS for path in (root / folder).rglob("*") if path.suffix in {".py", ".sql"}]
    paths = sorted(str(path.relative_to(root)) for path in found)
    return [path for path in paths if not any(part in path for part in LEFT_OUT)]


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    return sql_code.mutants(path, source) if path.endswith(".sql") else python_code.mutants(path, source)


def drawn(root: Path, seed: int, count: int) -> list[Mutant]:
    """Draw this many; those of fencing and transitions first."""
    sources = {path: (root / path).read_bytes() for path in files(root)}
    possible = {path: mutants_of(path, source) for path, source in sources.items()}
    sizes = {path: size(sources[path]) if possible[path] else 0 for path in sources}
    found: list[Mutant] = []
    for path, share in shares(sizes, count).items():
        generator = random.Random(f"{seed} {path}")
        found += generator.sample(possible[path], min(share, len(possible[path])))
    return sorted(found, key=lambda mutant: not mutant.fencing)


def size(source: bytes) -> int:
    """Lines that are neither empty nor a comment."""
    lines = [line.strip() for line in source.splitlines()]
    return sum(1 for line in lines if line and not line.startswith((b"#", b"--")))


def shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """Divide a count in proportion to sizes; what is left goes to the largest remainders."""
    total = sum(sizes.values()) or 1
    exact = {name: count * part / total for name, part in sizes.items()}
    found = {name: int(part) for name, part in exact.items()}
    order: Sequence[str] = sorted(exact, key=lambda name: (found[name] - exact[name], name))
    for name in order[: count - sum(found.values())]:
        found[name] += 1
    return found
