"""The disk space that a SQLite file has in reserve: made once, repaired after a crash, safe with two processes."""

import asyncio
import os
import sqlite3
import stat
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from holdfast.store import sqlite_reserve
from holdfast.store.migrate import migrate
from holdfast.store.sqlite_reserve import FEWEST_PAGES, LOG_BYTES, OPEN_BYTES, add_pages, drop_pages, free_pages
from holdfast.store.store import Store, connect


@pytest.fixture
async def path(tmp_path: Path) -> AsyncIterator[Path]:
    database = await connect(f"sqlite:///{tmp_path / 'store.db'}")
    await migrate(database)
    yield tmp_path / "store.db"
    await database.close()


def tables(path: Path) -> set[str]:
    connection = sqlite3.connect(path)
    try:
        return {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    finally:
        connection.close()


def pages(path: Path) -> int:
    connection = sqlite3.connect(path)
    try:
        return free_pages(connection)
    finally:
        connection.close()


async def make_room(path: Path, *, stores: int = 1) -> None:
    async with AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(Store(await connect(f"sqlite:///{path}"))) for _ in range(stores)]
        await asyncio.gather(*(store.make_room() for store in opened))


async def test_reserve_is_made_and_readable_by_its_owner_alone(path: Path) -> None:
    before = os.umask(0)
    try:
        await make_room(path)
    finally:
        os.umask(before)
    assert pages(path) >= FEWEST_PAGES
    assert "room_to_free" not in tables(path)
    room, log = path.with_name("store.db-room"), path.with_name("store.db-wal")
    assert stat.S_IMODE(room.stat().st_mode) == 0o600
    assert (room.stat().st_size, room.stat().st_blocks * 512 >= OPEN_BYTES) == (0, True)
    assert log.stat().st_blocks * 512 >= LOG_BYTES
    size = os.stat(path).st_size
    await make_room(path)
    assert os.stat(path).st_size == size


async def test_pages_of_a_process_that_died_before_it_freed_them_are_freed(path: Path) -> None:
    connection = sqlite3.connect(path)
    add_pages(connection)
    connection.commit()
    connection.close()
    assert "room_to_free" in tables(path)
    await make_room(path)
    assert "room_to_free" not in tables(path)
    assert pages(path) >= FEWEST_PAGES


async def test_two_processes_at_once_make_room_without_an_error(path: Path) -> None:
    first, second = sqlite3.connect(path), sqlite3.connect(path)
    for step in (drop_pages, add_pages, drop_pages):
        for connection in (first, second):  # Each step is a transaction of its own, so these may interleave.
            step(connection)
            connection.commit()
    first.close()
    second.close()
    assert "room_to_free" not in tables(path)
    await make_room(path, stores=4)
    assert "room_to_free" not in tables(path)


async def test_link_in_the_place_of_the_reserve_is_not_followed(path: Path, tmp_path: Path) -> None:
    (tmp_path / "store.db-room").symlink_to(tmp_path / "elsewhere")
    sqlite_reserve.set_blocks_aside(path)
    assert not (tmp_path / "elsewhere").exists()
