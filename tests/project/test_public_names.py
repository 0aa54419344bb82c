"""Every public name is imported from `holdfast`, and costs nothing before it is used."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast import errors

HEAVY = ("asyncio", "msgspec", "httpx", "asyncpg", "fastapi", "starlette", "uvicorn", "pydantic")


def imported(code: str) -> set[str]:
    """Return which of the heavy modules a line of code imports, in a process of its own."""
    script = f"{code}\nimport sys\nprint(*(name for name in {HEAVY} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_every_public_name_can_be_imported_and_is_known_to_type_checkers() -> None:
    """Proves G1."""
    for name in holdfast.__all__:
        assert getattr(holdfast, name) is not None, name
    tree = ast.parse(Path(holdfast.__file__).read_text())
    declared = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast")
        for alias in node.names
    }
    assert declared == set(holdfast.__all__)
    assert set(holdfast.__all__) <= set(dir(holdfast))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = holdfast.nothing


def test_every_error_is_a_public_name() -> None:
    """Proves G1."""
    kinds = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)}
    assert kinds <= set(holdfast.__all__)


def test_import_of_the_package_imports_nothing_else() -> None:
    assert imported("import holdfast") == set()
    assert imported("from holdfast import errors, NotFound") == set()


def test_program_on_the_database_imports_no_web_framework() -> None:
    found = imported("from holdfast import Holdfast, Context, Process, Container, Pipeline, Task, Retry, Job")
    assert found == {"asyncio", "msgspec", "asyncpg"}
    assert imported("from holdfast import Client") <= {"asyncio", "msgspec", "httpx", "asyncpg"}
