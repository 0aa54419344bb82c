"""The reference pages are made from the code, and are current; every word that the record uses is explained."""

import re
from pathlib import Path

import pytest
from scripts.python_reference import GROUPS, error_names, undocumented
from scripts.reference import FOLDER, PAGES

import holdfast
from holdfast.catalogue import ACTIONS, CODES, EVENTS
from holdfast.runner.function import OURS

SOURCES = Path(__file__).parents[2] / "src" / "holdfast"
MADE = r"Error\(code=|CannotStart\(|\b_failed\(|Outcome\.failed\(|_ended\(Status\.\w+, end, "
CODE = re.compile(rf"""(?:{MADE})"(\w+)"|'code', '(\w+)'""")
TYPE = re.compile(r"""(?:\bevent\(|NewEvent\(type=)"(\w+)"|(?:updated_at|, seq), '(status|lease|cancel|audit)'""")


@pytest.mark.parametrize("name", PAGES)
def test_reference_page_is_current(name: str) -> None:
    """Proves O9."""
    kept = FOLDER / name
    assert kept.exists(), "`make docs` writes it"
    assert kept.read_text() == PAGES[name](), f"{name} is not current: `make docs` writes it again"


def test_python_page_has_every_public_name() -> None:
    """Proves G1."""
    text = PAGES["python.md"]()
    grouped = [name for names in GROUPS.values() for name in names]
    assert sorted([*grouped, *error_names(), "errors"]) == sorted(holdfast.__all__), "a name has one place on the page"
    for name in grouped:
        assert f"\n### `{name}`\n" in text, name
    for name in error_names():
        assert f"\n| `{name}` |" in text, name


def test_every_public_name_explains_itself() -> None:
    """Proves G1: names, their methods and their properties have docstrings of their own."""
    assert undocumented() == []


def test_name_without_a_docstring_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdfast.NotFound, "__doc__", None)
    monkeypatch.setattr(holdfast.Job.cancel, "__doc__", None)
    assert undocumented() == ["Job.cancel", "NotFound"]


def test_reference_explains_every_code() -> None:
    text = "\n".join(path.read_text() for end in ("py", "sql") for path in SOURCES.rglob(f"*.{end}"))
    used = {one or other for one, other in CODE.findall(text)}
    assert len(used) > 10
    assert used <= set(CODES), "holdfast.catalogue says what a code means"
    documented = {one or other for one, other in TYPE.findall(text)}
    assert documented >= {"status", "lease", "cancel", "audit", "log"}
    assert documented <= set(EVENTS), "holdfast.catalogue says what an event means"
    assert {"status", "log", "end"} <= OURS


def test_actions_of_the_audit_trail_are_explained() -> None:
    text = "\n".join(path.read_text() for path in SOURCES.rglob("*.py") if path.name != "catalogue.py")
    assert {action for action in ACTIONS if f'"{action}"' in text} == set(ACTIONS)
    nouns = "|".join({action.partition(".")[0] for action in ACTIONS})
    used = set(re.findall(rf'[ (]"((?:{nouns})\.[a-z]+)"', text))
    assert used == set(ACTIONS), "holdfast.catalogue says what an action means"
