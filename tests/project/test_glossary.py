"""The check of words finds what it should, and its list of exceptions can only shrink."""

import pytest
from scripts.glossary import problems


@pytest.mark.parametrize(
    "path",
    [
        "src/holdfast/worker/desk.py",
        "src/holdfast/store/sql/sqlite/moves.sql",
        "src/holdfast/duties/orphans.py",
        "tests/support/racers.py",
        "tests/worker/test_taking.py",
        "torture/world.py",
        "torture/checks/falls.py",
        "bench/sites.py",
    ],
)
def test_module_with_a_replaced_name_is_found(path: str) -> None:
    (problem,) = problems([(path, ""), ("src/holdfast/worker/worker.py", "")], {})
    assert problem.startswith(f"{path}: `")
    assert problem.endswith("is not a name for a module; see docs/glossary.md")


def test_name_that_is_wrong_in_one_folder_is_fine_in_another() -> None:
    assert list(problems([("src/holdfast/store/orphans.py", ""), ("src/holdfast/runner/uploads.py", "")], {})) == []


def test_replaced_identifier_is_found_in_its_folder_and_not_in_strings() -> None:
    code = 'fleet = Hold("fleet")  # the fleet\n'
    assert [problem.split(" is ")[0] for problem in problems([("tests/a.py", code)], {})] == [
        "tests/a.py:1: `fleet`",
        "tests/a.py:1: `Hold`",
    ]
    assert [problem.split(" is ")[0] for problem in problems([("bench/a.py", code)], {})] == ["bench/a.py:1: `Hold`"]


def test_replaced_identifier_is_found_in_the_folders_below_its_own() -> None:
    assert list(problems([("src/holdfast/store/a.py", "marked = Gone()\n")], {})) == [
        "src/holdfast/store/a.py:1: `marked` is not a name for it; see docs/glossary.md",
        "src/holdfast/store/a.py:1: `Gone` is not a name for it; see docs/glossary.md",
    ]
    assert list(problems([("src/holdfast/stores.py", "marked = 1\n")], {})) == []


def test_phrase_is_found_with_its_line_and_a_better_one() -> None:
    (problem,) = problems([("docs/a.md", "Fine.\nWhoever adopts it reads the log.\nForeseen.")], {})
    assert problem.startswith("docs/a.md:2: 'whoever' reads oddly; write: ")


@pytest.mark.parametrize(
    "text", ["is behind the\nlast event", "# is behind the\n# last event", "-- behind\n  -- the last"]
)
def test_phrase_is_found_across_lines(text: str) -> None:
    (problem,) = problems([("docs/a.md", f"Fine.\n{text}")], {})
    assert problem.startswith("docs/a.md:2: 'behind the last' reads oddly; write: ")


@pytest.mark.parametrize("text", ["The job behind it waits.", "a task begins behind\none that failed"])
def test_behind_is_not_written_for_after(text: str) -> None:
    (problem,) = problems([("docs/a.md", text)], {})
    assert problem.startswith("docs/a.md:1: ")
    assert "after or past" in problem


@pytest.mark.parametrize("text", ["behind a proxy", "# behind\n# an engine", "ahead if off else 'behind'"])
def test_behind_is_written_where_something_is_in_front(text: str) -> None:
    assert list(problems([("docs/a.md", text)], {})) == []


@pytest.mark.parametrize("word", ["told", "turn", "ledger", "standing", "course"])
def test_word_that_had_several_meanings_names_nothing(word: str) -> None:
    assert len(list(problems([("bench/a.py", f"{word} = 1\n")], {}))) == 1


@pytest.mark.parametrize(
    "text",
    [
        "7 is behind the last event",
        "Twice is once.",
        "no claim: %s",
        "told a second time: leaving at once",
        "%d jobs were claimed by this worker, and it never heard of them",
        "is the tool's to say; leave it out",
        "is not one that a list answered",
        "over N bytes are uploaded and wait",
        "they go after a day",
        "what it left does not keep the contract of result.json and output/",
        "See to it the workspace has so many tasks behind it",
        "what should bring it there is gone",
    ],
)
def test_every_example_of_the_style_is_found(text: str) -> None:
    assert list(problems([("docs/a.md", text)], {}))


def test_exception_holds_for_as_many_as_it_says() -> None:
    text = "It starts anew.\nAnew."
    assert list(problems([("docs/a.md", text)], {"docs/a.md": 2})) == []
    assert len(list(problems([("docs/a.md", f"{text}\nAnew.")], {"docs/a.md": 2}))) == 3


def test_exception_that_is_too_generous_is_found() -> None:
    (problem,) = problems([("docs/a.md", "Fine.")], {"docs/a.md": 1})
    assert problem.endswith("KNOWN in scripts/glossary.py says 1: lower it")
