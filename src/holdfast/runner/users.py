"""Selects the users of commands: without root the worker's own; as root one uid per attempt, or one configured user."""

import os
import pwd
import stat
import subprocess
from pathlib import Path

import msgspec

from holdfast.config import Settings
from holdfast.errors import ConfigError
from holdfast.runner import supervisor
from holdfast.runner.base import CannotStart
from holdfast.runner.uids import UidPool, unusable


class User(msgspec.Struct, frozen=True):
    uid: int
    gid: int


STRANGER = User(65_534, 65_534)
"""A user that owns nothing on this host, for attempts."""


def find_user(name: str) -> User:
    """Look a user up by name, or by number as `uid` or `uid:gid`."""
    uid, _, gid = name.partition(":")
    try:
        if uid.isdigit():
            return User(int(uid), int(gid or uid))
        found = pwd.getpwnam(name)
    except (KeyError, ValueError):
        raise CannotStart("command_missing", f"there is no user {name} on this host") from None
    return User(found.pw_uid, found.pw_gid)


def find_job_user(name: str, *, allow_root: bool) -> User:
    """Look up the user that a job names. Root is refused here, because only this host knows the uid of a name."""
    user = find_user(name)
    refuse_root(user, f"user {name} of this host", allow_root=allow_root)
    return user


def refuse_root(user: User, who: str, *, allow_root: bool) -> None:
    """Refuse to start a job as root, or in root's group, unless that is allowed."""
    if not allow_root and 0 in (user.uid, user.gid):
        raise CannotStart(
            "root_refused",
            f"{who} is {user.uid}:{user.gid}, and jobs run as root only where HOLDFAST_ALLOW_ROOT_JOBS=true is set for "
            "the worker",
        )


def user_for(name: str | None, state: Path) -> User | None:
    """Return the user that all commands run as. None: the worker's user, or as root without a name, one per attempt.

    Raise ConfigError if such a user cannot reach the state folder.
    """
    if os.geteuid() != 0:
        return None
    if name is None:
        _check_reach(state, STRANGER, "each attempt runs as a user of its own, which")
        return None
    try:
        user = find_user(name)
    except CannotStart as error:
        raise ConfigError([f"HOLDFAST_PROCESS_USER is {name!r}: {error}"]) from None
    if user.uid == 0:
        return None
    _check_reach(state, user, f"commands run as user {name}, who")
    return user


def uids_for(settings: Settings) -> UidPool | None:
    """Return the pool of uids if each attempt gets its own, else None."""
    if os.geteuid() != 0 or settings.process_user is not None:
        return None
    first, last = settings.uid_range
    if (problem := unusable(first, last)) is not None:
        raise ConfigError([problem])
    return UidPool(first, last, settings.process_uids_dir.absolute(), private=can_be_private())


def can_be_private() -> bool:
    """Return whether attempts can have a private view here: a container may lack the privilege to mount."""
    return subprocess.run([supervisor.path(), "--probe-private"], capture_output=True, check=False).returncode == 0


def known_users(first: int, last: int) -> list[str]:
    """Return the users of this host whose uid or gid is within a range."""
    return [one.pw_name for one in pwd.getpwall() if first <= one.pw_uid <= last or first <= one.pw_gid <= last]


def _check_reach(state: Path, user: User, who: str) -> None:
    shut = [folder for folder in [state.absolute(), *state.absolute().parents] if not _open_to(folder.stat(), user)]
    if shut:
        raise ConfigError(
            [
                f"HOLDFAST_STATE_DIR: {who} cannot get through {shut[-1]}; use a folder such as /var/lib/holdfast, or "
                "set HOLDFAST_PROCESS_USER=root to run them as root"
            ]
        )


def _open_to(folder: os.stat_result, user: User) -> bool:
    if folder.st_uid == user.uid:
        return bool(folder.st_mode & stat.S_IXUSR)
    if folder.st_gid == user.gid:
        return bool(folder.st_mode & stat.S_IXGRP)
    return bool(folder.st_mode & stat.S_IXOTH)
