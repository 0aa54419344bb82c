"""The page of behaviours and the tests agree, or `make check` says what to do."""

import pytest
from scripts.behaviours import Proof, expand, last_cell, parse, problems, written

PAGE = """\
# Behaviours

| id | behaviour | check | tests |
| --- | --- | --- | --- |
| A1 | It works. | Try it. | `test_a.py::test_one` |
| A2 | It `a \\| b`. | Try both. | `test_a.py::test_one`, `test_b.py::TestIt::test_two` |
| B1 | It flies. | Throw it. | open: not built yet |
"""
ONE = Proof("test_a.py", "test_one", ("A1", "A2"))
TWO = Proof("test_b.py", "TestIt::test_two", ("A2",))


def test_rows_are_read_from_docstrings_without_an_import() -> None:
    source = '''
"""Proves A9: a module is no test."""
import nothing_of_this_name

async def test_one():
    """It works. Proves A1, A2. Proves A1.

    Proves B1; and B2 but for crashes.
    """

class TestIt:
    def test_two(self):
        """Proves A2-A4, B7–B8: also
        when it is proven that A9 does not hold."""

    def test_three(self):
        """A1: it works."""

    def test_four(self):
        """Proves: A1."""

def helper():
    """Proves A9."""

def test_nothing(): ...
'''
    assert list(parse("test_a.py", source)) == [
        Proof("test_a.py", "test_one", ("A1", "A2", "B1", "B2")),
        Proof("test_a.py", "TestIt::test_two", ("A2", "A3", "A4", "B7", "B8")),
        Proof("test_a.py", "TestIt::test_three", unreadable=True),
        Proof("test_a.py", "TestIt::test_four", unreadable=True),
        Proof("test_a.py", "test_nothing"),
    ]


def test_range_that_makes_no_sense_is_the_id_of_no_row() -> None:
    assert list(expand("A3-A1, A1-B2, A1-A2-A3, A1-2, B9-B11")) == [
        *("A3-A1", "A1-B2", "A1-A2-A3", "A1-2"),
        *("B9", "B10", "B11"),
    ]


def test_many_tests_are_counted_by_file() -> None:
    few = [Proof("test_a.py", f"test_{n}", ("A1",)) for n in range(3)]
    assert last_cell(few) == "`test_a.py::test_0`, `test_a.py::test_1`, `test_a.py::test_2`"
    assert last_cell([Proof("test_b.py", "test_it", ("A1",)), *few]) == "`test_a.py` (3), `test_b.py` (1)"
    files = [Proof(f"test_{name}.py", "test_it", ("A1",)) for name in "cdefghi"]
    assert last_cell([*few, *files]).startswith("`test_a.py` (3), `test_c.py` (1), ")
    assert last_cell([*few, *files]).endswith(", `test_g.py` (1) and 2 in other files")


def test_page_that_agrees_with_the_tests_stays_as_it_is() -> None:
    assert list(problems(PAGE, [ONE, TWO])) == []
    assert written(PAGE, [ONE, TWO]) == PAGE


def test_last_column_is_written_unless_the_row_is_open() -> None:
    empty = PAGE.replace("`test_a.py::test_one`, `test_b.py::TestIt::test_two`", "").replace(
        "`test_a.py::test_one`", ""
    )
    assert "test_a" not in empty
    assert written(empty, [ONE, TWO]) == PAGE


@pytest.mark.parametrize(
    ("page", "tests", "expected"),
    [
        (PAGE.replace("open: not built yet", ""), [ONE, TWO], ["B1: no test proves it. Write `Proves B1.`"]),
        (PAGE.replace("open: not built yet", "open"), [ONE, TWO], ["B1: no test proves it.", "Run `make docs`."]),
        (
            PAGE,
            [ONE, TWO, Proof("test_c.py", "test_it", ("B2",))],
            ["::test_it proves B2, but", "no such row"],
        ),
        (
            PAGE,
            [ONE, TWO, Proof("test_c.py", "test_it", ("B1",))],
            ["B1 is marked open, but test_c.py::test_it"],
        ),
        (PAGE, [ONE], ["docs/behaviours.md does not name the tests as they are now. Run `make docs`."]),
        (PAGE, [TWO], ["A1: no test proves it.", "Run `make docs`."]),
        (PAGE, [ONE, TWO, Proof("test_c.py", "test_it", unreadable=True)], ["test_c.py::test_it: the docstring names"]),
        (PAGE.replace("A2 ", "A1 "), [ONE, TWO], ["A1 has 2 rows", "proves A2, but"]),
        (PAGE.replace("\\|", "|"), [ONE, TWO], ["A2: the row has 5 cells."]),
    ],
    ids=["unproven", "no reason", "unknown", "open", "new name", "gone", "unreadable", "twice", "bar"],
)
def test_each_disagreement_is_reported_with_what_to_do(page: str, tests: list[Proof], expected: list[str]) -> None:
    found = "\n".join(problems(page, tests))
    assert found
    for text in expected:
        assert text in found
