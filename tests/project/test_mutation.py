"""The mutation tool draws the faults it promises, and cleans up after each."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.mutation import python_code, sql_code, survivors
from scripts.mutation.bounded import TIMED_OUT
from scripts.mutation.coverage_map import CoverageMap, instrumented, read_hits
from scripts.mutation.judge import Verdict
from scripts.mutation.mutant import Edit, Mutant
from scripts.mutation.sample import drawn, files, mutants_of, shares
from scripts.mutation.tree import ROOT, Result, Tree

PYTHON = b'''\
"""A module."""
__all__ = ["f"]
LIMIT = 1000

async def f(a: int = 1) -> int:
    """Say 1 < 2."""
    if a < 2 and not a:
        log.debug("a is %d", 1 + a)
        raise ValueError(f"{a + 1} is too much", 7)
    await g(a)
    return a + 1
'''
SQL = b"""\
-- Not a statement: a = b.
-- name: finish
-- Says a = b.
UPDATE jobs
SET status = 'succeeded', seq = seq + 1
WHERE id = :id
  AND token = :token
  AND owner IS NOT NULL;
"""


def changes(found: list[Mutant]) -> list[str]:
    return [mutant.change for mutant in found]


def test_python_is_mutated_but_not_its_texts_and_types() -> None:
    assert changes(python_code.mutants("a.py", PYTHON)) == [
        "`1000` → `0` in `LIMIT = 1000`",
        "`1` → `2` in `async def f(a: int = 1) -> int:`",
        "`a < 2 and not a` → `((a < 2) or (not a))`",
        "`a < 2 and not a` → `((a < 2))`",
        "`a < 2 and not a` → `((not a))`",
        "`a < 2` → `a <= 2`",
        "`2` → `0` in `if a < 2 and not a:`",
        "`not a` → `a`",
        '`raise ValueError(f"{a + 1} is too much", 7)` removed',
        "`await g(a)` → `g(a)`",
        "`await g(a)` removed",
        "`return a + 1` → `return None`",
        "`a + 1` → `a - 1`",
        "`1` → `2` in `return a + 1`",
    ]


def test_sql_is_mutated_but_not_its_comments() -> None:
    found = sql_code.mutants("sql/jobs.sql", SQL)
    assert {mutant.where for mutant in found} == {"finish (both)"}
    assert changes(found) == [
        "`SET status = 'succeeded', seq = seq + 1` → `SET seq = seq + 1`",
        "`SET status = 'succeeded', seq = seq + 1` → `SET status = 'failed', seq = seq + 1`",
        "`SET status = 'succeeded', seq = seq + 1` → `SET status = 'succeeded'`",
        "`SET status = 'succeeded', seq = seq + 1` → `SET status = 'succeeded', seq = seq`",
        "`WHERE id = :id AND token = :token` → `WHERE token = :token`",
        "`WHERE id = :id` → `WHERE id <> :id`",
        "`AND token = :token` removed",
        "`AND token = :token` → `AND token <> :token`",
        "`AND owner IS NOT NULL;` → `;`",
        "`AND owner IS NOT NULL;` → `AND owner IS NULL;`",
    ]


def test_sql_of_one_dialect_is_mutated_for_that_dialect() -> None:
    text = b"-- name: x\nSELECT 1 WHERE a = b;\n-- sqlite\nSELECT 1 WHERE a < b;\n-- fragment: y\na > b\n"
    found = sql_code.mutants("sql/jobs.sql", text)
    assert [(mutant.where, sql_code.dialect_of(mutant.where), mutant.unit) for mutant in found] == [
        ("x (postgres)", "postgres", "sql:x"),
        ("x (sqlite)", "sqlite", "sql:x"),
        ("y (both)", None, "fragment:y"),
    ]


def test_mutants_of_python_compile_and_each_has_a_name_of_its_own() -> None:
    for path in files(ROOT):
        source = (ROOT / path).read_bytes()
        found = mutants_of(path, source)
        assert len({mutant.key for mutant in found}) == len(found)
        for mutant in found[::40] if path.endswith(".py") else ():
            ast.parse(mutant.edit.applied(source))


def test_seed_decides_what_is_drawn_from_both_languages_and_dialects() -> None:
    first = drawn(ROOT, 1, 100)
    assert len(first) == 100
    assert first == drawn(ROOT, 1, 100)
    assert first != drawn(ROOT, 2, 100)
    for part in ("store/sql/", "holdfast/worker/", ".py"):
        assert sum(part in mutant.path for mutant in first) > 10
    for dialect in ("postgres", "sqlite", "both"):
        assert sum(f"({dialect})" in mutant.where for mutant in first) > 1
    assert [mutant.fencing for mutant in first] == sorted((mutant.fencing for mutant in first), reverse=True)


def test_shares_follow_sizes_and_add_up() -> None:
    assert shares({"a": 50, "b": 30, "c": 15, "d": 5, "e": 0}, 10) == {"a": 5, "b": 3, "c": 2, "d": 0, "e": 0}


def test_measured_code_notes_blocks_and_statements() -> None:
    source = b'def f(x):\n    """Docs."""\n    if x:\n        return run("claim")\n    return "other"\n'
    notes: list[str] = []
    space: dict[str, object] = {"run": str.upper}
    text = instrumented("a.py", source, {"claim"}, measured=True)
    exec(text.replace("from mutation_probe import hit as _mutation_hit", ""), space)

    def hit(unit: str, value: object) -> object:
        notes.append(unit)
        return value

    space["_mutation_hit"] = hit
    assert eval("f(0), f(1)", space) == ("other", "CLAIM")
    assert notes == ["a.py:2:4", "a.py:2:4", "a.py:4:8", "sql:claim"]
    units = {mutant.unit for mutant in python_code.mutants("a.py", source)}
    assert units == {"a.py:2:4", "a.py:4:8"}


def mutant_of(path: str, unit: str, change: str = "`a` → `b`", *, where: str = "f") -> Mutant:
    return Mutant(path, where, change, 1, unit, Edit(0, 1, "x"))


def test_tests_of_a_mutant_are_those_that_execute_it_quick_ones_first() -> None:
    hits = ["t.py::a[postgres]\tsql:x", "t.py::b[sqlite]\tsql:x", "t.py::c\tsql:x", "t.py::bad\tsql:x", "\tsql:x"]
    results = [
        Result("t.py::a[postgres]", "passed", 0.1, False),
        Result("t.py::b[sqlite]", "passed", 0.3, True),
        Result("t.py::c", "passed", 0.2, False),
        Result("t.py::bad", "failed", 0.1, True),
    ]
    known = CoverageMap(code="").with_measured({"t.py": "1"}, read_hits(hits), results)
    assert known.failed == ["t.py::bad"]
    assert known.tests_of(mutant_of("jobs.sql", "sql:x", where="x (postgres)")) == ["t.py::a[postgres]", "t.py::c"]
    assert known.tests_of(mutant_of("jobs.sql", "sql:x", where="x (sqlite)")) == ["t.py::b[sqlite]", "t.py::c"]
    assert len(known.tests_of(mutant_of("jobs.sql", "sql:x", where="x (both)"))) == 3
    assert known.tests_of(mutant_of("jobs.py", "other")) == []
    assert known.without(["t.py"]).tests_of(mutant_of("jobs.sql", "sql:x")) == []


def test_mutant_is_taken_out_of_the_tree_again(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_bytes(PYTHON)
    first = python_code.mutants("a.py", PYTHON)[0]
    with Tree(tmp_path, "").holding(first):
        assert b"LIMIT = 0\n" in (tmp_path / "a.py").read_bytes()
    assert (tmp_path / "a.py").read_bytes() == PYTHON


def test_accepted_survivor_of_fencing_is_equivalent() -> None:
    entry = '[[survivor]]\nwhere = "f"\nchange = "{}"\nkind = "{}"\nreason = "it is so"\n'
    plain, fencing = mutant_of("a.py", "", "`a` → `b`"), mutant_of("a.py", "", "`token` removed")
    text = entry.format("`a` → `b`", "harmless") + entry.format("`token` removed", "harmless")
    reasons = survivors.accepted(text)
    assert survivors.reason_for(plain, reasons) == "harmless: it is so"
    assert survivors.reason_for(fencing, reasons) is None
    assert survivors.reason_for(fencing, survivors.accepted(text.replace("harmless", "equivalent"))) is not None
    with pytest.raises(ValueError, match="kind"):
        survivors.accepted(entry.format("x", "unclear"))
    assert Verdict(plain, "", 1, 0).survived


def test_list_of_survivors_can_be_read() -> None:
    survivors.accepted(survivors.FILE.read_text())


def test_time_limit_ends_also_what_left_its_session(tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    program = f"setsid sh -c 'echo $$ > {mark}; exec sleep 1000' & sleep 1000"
    command = [sys.executable, "-m", "scripts.mutation.bounded", "1", "sh", "-c", program]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == TIMED_OUT
    assert not Path(f"/proc/{mark.read_text().strip()}").exists()
