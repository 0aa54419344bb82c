"""The check of words finds what it should, and its list of exceptions can only shrink."""

from scripts.glossary import problems


def test_module_with_a_replaced_name_is_found() -> None:
    (problem,) = problems([("src/holdfast/worker/desk.py", ""), ("src/holdfast/worker/worker.py", "")], {})
    assert problem == "src/holdfast/worker/desk.py: `desk` is not a name for a module; see docs/glossary.md"


def test_phrase_is_found_with_its_line_and_a_better_one() -> None:
    (problem,) = problems([("docs/a.md", "Fine.\nWhoever adopts it reads the log.\nForeseen.")], {})
    assert problem.startswith("docs/a.md:2: 'whoever' reads oddly; write: ")


def test_exception_holds_for_as_many_as_it_says() -> None:
    text = "It starts anew.\nAnew."
    assert list(problems([("docs/a.md", text)], {"docs/a.md": 2})) == []
    assert len(list(problems([("docs/a.md", f"{text}\nAnew.")], {"docs/a.md": 2}))) == 3


def test_exception_that_is_too_generous_is_found() -> None:
    (problem,) = problems([("docs/a.md", "Fine.")], {"docs/a.md": 1})
    assert problem.endswith("KNOWN in scripts/glossary.py says 1: lower it")
