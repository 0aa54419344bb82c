"""Which tests execute which code: measured once, in a private copy whose code notes what it executes.

A block of Python is a list of statements in a function; a statement of SQL counts as executed where its name appears as
a string. `build/mutation-map.json` keeps the map until the package changes; a changed file of tests is measured again.
"""

import ast
import hashlib
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path, PurePath

import msgspec
from scripts.mutation import sql_code
from scripts.mutation.mutant import Mutant
from scripts.mutation.python_code import FUNCTIONS, block_of, blocks, is_docstring
from scripts.mutation.sample import FOLDERS, files
from scripts.mutation.tree import ROOT, Result, Tree

TESTS = ("tests/unit", "tests/store", "tests/worker", "tests/service", "tests/cli", "tests/crash")
"""The tiers whose tests use the store or a worker."""
IGNORED = (
    "tests/store/test_lease_races.py", "tests/store/test_lane_races.py", "tests/store/test_dependency_races.py",
    "tests/store/test_stop_races.py", "tests/store/test_mixed_races.py", "tests/store/test_sqlite_races.py",
    "tests/worker/test_worker_hosts.py",
    "tests/service/test_systemd.py", "tests/service/test_connections.py", "tests/service/test_client_outage.py",
    "tests/service/test_openapi.py", "tests/crash/test_service_crash.py",
)  # fmt: skip
"""Files that take minutes, or that hardly concern the store and the worker."""
MEASURE_SECONDS = 3600.0
FILE = ROOT / "build" / "mutation-map.json"


class CoverageMap(msgspec.Struct, frozen=True):
    """For every block or statement its tests, and for every test how long it took."""

    code: str
    """A digest of the code that was measured."""
    files: dict[str, str] = {}
    """The files of tests that were measured, each with a digest."""
    units: dict[str, list[str]] = {}
    seconds: dict[str, float] = {}
    quick: list[str] = []
    failed: list[str] = []
    """Tests that fail without a mutant: none of them can tell anything."""

    def without(self, files: Collection[str]) -> "CoverageMap":
        """Forget what files of tests said."""

        def kept(test: str) -> bool:
            return test.partition("::")[0] not in files

        return CoverageMap(
            code=self.code,
            files={name: hashed for name, hashed in self.files.items() if name not in files},
            units={unit: [*filter(kept, tests)] for unit, tests in self.units.items()},
            seconds={test: seconds for test, seconds in self.seconds.items() if kept(test)},
            quick=[*filter(kept, self.quick)],
            failed=[*filter(kept, self.failed)],
        )

    def with_measured(
        self, files: Mapping[str, str], units: Mapping[str, Iterable[str]], results: Sequence[Result]
    ) -> "CoverageMap":
        """Add what was measured of files of tests."""
        return CoverageMap(
            code=self.code,
            files={**self.files, **files},
            units={u: sorted({*self.units.get(u, ()), *units.get(u, ())}) for u in {*self.units, *units}},
            seconds={**self.seconds, **{r.test: r.seconds for r in results if r.outcome == "passed"}},
            quick=[*self.quick, *(result.test for result in results if result.quick)],
            failed=[*self.failed, *(result.test for result in results if result.outcome == "failed")],
        )

    def tests_of(self, mutant: Mutant) -> list[str]:
        """The tests that execute a mutant: those of the file's name first, then the quick ones, each by duration."""
        named = f"test_{PurePath(mutant.path).stem}.py"
        units = sql_code.units_of(mutant.unit)
        found = sorted({t for u in units for t in self.units.get(u, [])}) if mutant.unit else self._of_file(mutant.path)
        if not found:  # Perhaps a program executes it that a test starts with an environment of its own.
            found = [test for test in self.seconds if f"/{named}::" in test]
        if mutant.path.endswith(".sql"):
            found = [test for test in found if _speaks(test, sql_code.dialect_of(mutant.where))]
        quick = set(self.quick)
        return sorted(
            (test for test in found if test in self.seconds and test not in self.failed),
            key=lambda test: (test not in quick, named not in test, self.seconds[test], test),
        )

    def _of_file(self, path: str) -> list[str]:
        """What an import runs, such as a constant: all tests that execute anything of the file."""
        return sorted({test for unit, tests in self.units.items() if unit.startswith(f"{path}:") for test in tests})


def _speaks(test: str, dialect: str | None) -> bool:
    """Whether a test may run on a dialect, or on any; one that names none may run on both."""
    parameters = test.partition("[")[2]
    return dialect is None or dialect in parameters or not any(other in parameters for other in ("sqlite", "postgres"))


def digest(paths: Iterable[Path]) -> str:
    found = hashlib.sha256()
    for path in paths:
        found.update(str(path.name).encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def code_digest(root: Path) -> str:
    """Of everything that can change the whole map: the package, and what all tests share."""
    folders = (root / "src/holdfast", root / "tests/support")
    found = [path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".sql"}]
    return digest([*sorted(found), *sorted((root / "tests").rglob("conftest.py"))])


def measured_files(root: Path) -> dict[str, str]:
    """The files of tests that are measured, each with a digest."""
    found = [path for folder in TESTS for path in sorted((root / folder).glob("test_*.py"))]
    names = {str(path.relative_to(root)): path for path in found}
    return {name: digest([path]) for name, path in names.items() if name not in IGNORED}


def coverage_map(tree: Tree) -> CoverageMap:
    """Read the map, and measure in this tree what is missing; its sources are restored afterwards."""
    code, now = code_digest(tree.root), measured_files(tree.root)
    known = msgspec.json.decode(FILE.read_bytes(), type=CoverageMap) if FILE.exists() else None
    if known is None or known.code != code:
        known = CoverageMap(code=code)
    stale = [name for name, hashed in known.files.items() if now.get(name) != hashed]
    missing = [name for name, hashed in now.items() if known.files.get(name) != hashed]
    known = known.without(stale)
    if missing:
        known = known.with_measured({name: now[name] for name in missing}, *measure(tree, missing))
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_bytes(msgspec.json.encode(known))
    return known


def measure(tree: Tree, tests: Sequence[str]) -> tuple[Mapping[str, Iterable[str]], Sequence[Result]]:
    """Run files of tests in a tree whose code notes what it executes: the tests of every unit, and how they ended."""
    names = statement_names(tree.root)
    sources = {path: path.read_bytes() for path in (tree.root / "src/holdfast").rglob("*.py")}
    hits = tree.root.parent / "hits"
    hits.write_text("")
    hits.chmod(0o666)
    shutil.copy(Path(__file__).parent / "probe.py", tree.root / "src" / "mutation_probe.py")
    try:
        for path, source in sources.items():
            name = str(path.relative_to(tree.root))
            path.write_text(instrumented(name, source, names, measured=name.startswith(FOLDERS)))
        options = ("-n", "2", "--dist", "loadfile", *tests)
        ran = tree.pytest(*options, seconds=MEASURE_SECONDS, environment={"MUTATION_HITS": str(hits)})
        units = read_hits(hits.read_text().splitlines())
    finally:
        for path, source in sources.items():
            path.write_bytes(source)
        (tree.root / "src" / "mutation_probe.py").unlink()
        for folder in (tree.root / "src").rglob("__pycache__"):
            shutil.rmtree(folder)
    if ran.timed_out or not ran.results:
        raise RuntimeError(f"the tests do not run to their end:\n{ran.output[-4000:]}")
    return units, ran.results


def read_hits(lines: Iterable[str]) -> dict[str, set[str]]:
    """The tests of every unit."""
    found: dict[str, set[str]] = {}
    for line in lines:
        test, _, unit = line.rpartition("\t")
        if test:
            found.setdefault(unit, set()).add(test)
    return found


def statement_names(root: Path) -> set[str]:
    texts = [(root / path).read_text() for path in files(root) if path.endswith(".sql")]
    return {name for text in texts for kind, name in sql_code.NAME.findall(text) if kind == "name"}


def instrumented(path: str, source: bytes, names: set[str], *, measured: bool) -> str:
    """Make code note each name of a statement that it mentions and, if it is measured, each block that it executes."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    inner = [node for function in functions for node in ast.walk(function)]
    if measured:
        marks = {id(body): body for node in inner for body in blocks(node)}
        for body in marks.values():
            call = f"_mutation_hit({f'{path}:{block_of(body)}'!r}, None)"
            body.insert(1 if is_docstring(body[0]) else 0, ast.parse(call).body[0])
    _Names(names).visit(tree)
    place = 1 if tree.body and is_docstring(tree.body[0]) else 0
    while place < len(tree.body) and _is_future(tree.body[place]):
        place += 1
    tree.body[place:place] = ast.parse("from mutation_probe import hit as _mutation_hit").body
    return ast.unparse(ast.fix_missing_locations(tree))


def _is_future(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


class _Names(ast.NodeTransformer):
    """Wrap the strings in functions that are names of statements."""

    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._inside = False

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.JoinedStr | ast.pattern) or (isinstance(node, ast.Expr) and is_docstring(node)):
            return node
        if isinstance(node, ast.Constant) and self._inside and node.value in self._names:
            call = ast.parse(f"_mutation_hit({f'sql:{node.value}'!r}, {node.value!r})", mode="eval").body
            return ast.copy_location(call, node)
        inside, self._inside = self._inside, self._inside or isinstance(node, FUNCTIONS)
        self.generic_visit(node)
        self._inside = inside
        return node
