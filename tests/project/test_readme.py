"""README and quickstart work as typed, and everything that the docs refer to exists."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.doc_pages import ROOT, blocks, read_along

PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMED = [page for page in PAGES if "adr" not in page.parts]


def test_quickstart_works_as_typed(tmp_path: Path) -> None:
    """In a clean clone with an empty home folder. Proves O3, O7, R3, C8."""
    said = read_along(ROOT / "docs" / "quickstart.md", tmp_path)
    assert "hello\ndone\n" in said
    assert "\n".join(str(n) for n in range(1, 21)) + "\n" in said, "every number once"
    for words in ("it ended with 5", "it ended with 130", "it failed", "is blocked by job", "my turn"):
        assert words in said, words
    assert said.rstrip().endswith("succeeded")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is missing: run scripts/need-curl")
def test_readme_works_as_typed(tmp_path: Path) -> None:
    """Proves O3, R3."""
    said = read_along(ROOT / "README.md", tmp_path)
    assert "hello\ndone\n" in said
    for n in range(1, 21):
        assert len(re.findall(rf"^{n}$", said, re.MULTILINE)) == 1, n
    assert re.search(r'"status":"(queued|running|succeeded)"', said), "a worker may be quicker than the answer"


def test_skipped_blocks_of_a_page_are_run_elsewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "docs" / "quickstart.md"):
        for block in blocks(page):
            assert block.how is None or block.how == "until ready" or block.how.startswith("elsewhere, "), block
            for name in re.findall(r"tests/[\w/]+\.py", block.how or ""):
                assert (ROOT / name).exists(), name


def run(*arguments: str, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HOLDFAST_", "PYTEST_"))}
    env["HOLDFAST_PROCESS_USER"] = "root"
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_store_example_runs_as_printed(tmp_path: Path) -> None:
    (code,) = [block.text for block in blocks(ROOT / "docs" / "architecture.md") if block.kind == "python"]
    assert run("-c", code, cwd=tmp_path).splitlines()[-1] == "{'text': 'Hello Ada'}"


def test_the_example_of_a_test_passes(tmp_path: Path) -> None:
    (code,) = [block.text for block in blocks(ROOT / "docs" / "howto" / "testing.md") if block.kind == "python"]
    (tmp_path / "test_shop.py").write_text(code)
    assert "2 passed" in run("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_shop.py", cwd=tmp_path)


@pytest.mark.parametrize("page", NAMED, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_and_pages_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in sources, name
    for name in re.findall(r"`(tests/[\w/]+\.py)`", text):
        assert (ROOT / name).exists(), name
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        assert link.startswith("http") or (page.parent / link).exists(), link


@pytest.mark.parametrize("page", ["README.md", "SECURITY.md"])
def test_every_promise_names_its_proof(page: str) -> None:
    tables = (ROOT / page).read_text().split("| promise | proof |")[1:]
    lines = [row for table in tables for row in table.partition("\n\n")[0].splitlines()]
    rows = [row for row in lines if row.startswith("| ") and "---" not in row]
    assert len(rows) > 10
    for row in rows:
        assert "tests/" in row or "`test_" in row or "every test" in row, row
