"""The state folder: who this host is, which boots it has seen, and which of its workers are dead."""

import fcntl
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.runner.state_folder import StateFolder


def test_a_host_keeps_its_id_and_remembers_its_boots(tmp_path: Path) -> None:
    """Proves R6."""
    first = StateFolder(tmp_path, boot="monday")
    second = StateFolder(tmp_path, boot="tuesday")
    assert first.host == second.host
    assert second.domain == f"host:{first.host}:tuesday"
    assert second.domains == [second.domain, first.domain]
    again = StateFolder(tmp_path, boot="tuesday")
    assert again.domains == second.domains
    assert StateFolder(tmp_path / "other").host != first.host


def hold_forever(path: Path, ready: "multiprocessing.synchronize.Event") -> None:
    with StateFolder(path).locks("site").acquire("w:1"):
        ready.set()
        signal.pause()


def test_only_a_dead_workers_lock_can_be_taken(tmp_path: Path) -> None:
    """Proves L19."""
    locks = StateFolder(tmp_path).locks("site")
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold_forever, args=(tmp_path, ready))
    process.start()
    assert ready.wait(30)
    assert locks.others("w:2") == ["w:1"]
    assert locks.others("w:1") == []
    with locks.taken_from_dead("w:1") as dead:
        assert not dead
    process.kill()
    process.join()
    with locks.taken_from_dead("w:1") as dead:
        assert dead
        with locks.taken_from_dead("w:1") as twice:
            assert not twice
    assert locks.others("w:2") == []


def test_lock_file_stays_if_the_recovery_failed(tmp_path: Path) -> None:
    locks = StateFolder(tmp_path).locks("site")
    folder = tmp_path / "workers" / "site"
    (folder / "w:1.lock").touch()
    with pytest.raises(ConnectionError), locks.taken_from_dead("w:1"):
        raise ConnectionError
    assert locks.others("w:2") == ["w:1"]


def test_lock_file_that_was_taken_while_it_was_made_is_made_again(tmp_path: Path) -> None:
    """Another worker may take the lock file between its creation and its lock."""
    locks = StateFolder(tmp_path).locks("site")
    path = tmp_path / "workers" / "site" / "w:1.lock"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold_forever, args=(tmp_path, ready))
    process.start()
    assert not ready.wait(1)  # It waits for the lock of the file that we are about to remove.
    path.unlink()
    os.close(fd)
    assert ready.wait(30)
    with locks.taken_from_dead("w:1") as dead:
        assert not dead
    process.kill()
    process.join()


def test_a_state_folder_that_cannot_be_used_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"state folder .*file cannot be used"):
        StateFolder(tmp_path / "file")


def test_worker_that_leaves_attempts_keeps_its_lock_file(tmp_path: Path) -> None:
    """So that the next worker hands them over immediately. Proves L19."""
    locks = StateFolder(tmp_path).locks("site")
    with locks.acquire("w:1") as held:
        held.keep_file = True
    assert locks.others("w:2") == ["w:1"]
    with locks.acquire("w:3"):
        pass
    assert locks.others("w:2") == ["w:1"]
