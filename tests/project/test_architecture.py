"""The architecture page names the layers, the parts of the store, the files and the tables that exist."""

import re
import sqlite3
import tomllib
from collections.abc import Iterator
from pathlib import Path

from holdfast.store.migrate import migrate
from holdfast.store.store import Store, connect
from tests.support.doc_pages import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
SOURCES = ROOT / "src" / "holdfast"


def section(title: str) -> str:
    """Return the text below a heading; the text before the first heading is below the page's title."""
    return PAGE.split(f"# {title}\n", 1)[1].split("\n## ", 1)[0]


def first_cells(text: str) -> Iterator[list[str]]:
    """Yield the names in backquotes in the first cell of each row of a table."""
    for row in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE):
        if names := re.findall(r"`([^`]+)`", row):
            yield names


def test_table_of_layers_is_the_contract_of_the_imports() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = [one for one in config["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    layers = [layer.split(" | ") for layer in contract["layers"]]
    assert list(first_cells(section("Architecture"))) == layers


async def test_table_of_the_store_has_its_parts(tmp_path: Path) -> None:
    async with Store(await connect(f"sqlite:///{tmp_path}/a.db")) as store:
        parts = {name for name in vars(store) if name != "database"}
    assert sorted(name for names in first_cells(section("The store")) for name in names) == sorted(parts)


async def test_table_of_tables_has_tables_that_exist(tmp_path: Path) -> None:
    async with Store(await connect(f"sqlite:///{tmp_path}/a.db")) as store:
        await migrate(store.database)
    with sqlite3.connect(tmp_path / "a.db") as connection:
        tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.close()
    assert {name for names in first_cells(section("Tables")) for name in names} <= tables


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)*(?:\w+\.py|\w+/))`", PAGE))
    assert len(named) > 30, "the pattern finds the files"
    folders = (SOURCES, SOURCES / "worker")
    assert [name for name in sorted(named) if not any((folder / name).exists() for folder in folders)] == []
