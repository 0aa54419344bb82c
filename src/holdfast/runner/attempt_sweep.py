"""Removes the remains of one attempt on this host, stopping it first if it still runs."""

import contextlib
import time

from holdfast.runner.attempt_folder import AttemptFolder
from holdfast.runner.tree_removal import remove_tree
from holdfast.runner.wire import Command
from holdfast.runner.workspace import socket_folder


def sweep_attempt(folder: AttemptFolder, mark: str, *, keep_marker_for: float, uid: int | None = None) -> bool:
    """Remove the remains of an attempt that is over; stop it first if it runs. Return whether that is done.

    The start marker stays for `keep_marker_for` seconds, so that a late supervisor does not start the attempt again.
    `uid` is the attempt's own user, if it has one.
    """
    if not folder.path.exists():
        return True
    if folder.alive():
        started = folder.started()
        token = started.token if started else 1
        folder.send(Command(token=max(token, 1) + (1 << 40), verb="stop", kind="cancel"))
        return False
    only_marker = not (folder.path / "spec").exists()
    with contextlib.suppress(FileNotFoundError):
        if only_marker and time.time() - folder.path.stat().st_mtime < keep_marker_for:
            return False
    if folder.started() and not folder.exit() and folder.kill_leftovers(mark, uid):
        return False
    remove_tree(socket_folder(mark))
    if only_marker:
        remove_tree(folder.path)
    else:
        folder.reduce_to_marker()
    return True
