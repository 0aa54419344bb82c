"""Whom commands run as."""

import os
import pwd
import stat
from pathlib import Path

import msgspec

from holdfast.errors import ConfigError
from holdfast.runner.base import CannotStart


class User(msgspec.Struct, frozen=True):
    uid: int
    gid: int


def find_user(name: str) -> User:
    """Look a user up by name, or by number as `uid` or `uid:gid`."""
    uid, _, gid = name.partition(":")
    try:
        if uid.isdigit():
            return User(int(uid), int(gid or uid))
        found = pwd.getpwnam(uid)
    except (KeyError, ValueError):
        raise CannotStart("command_missing", f"there is no user {name} on this host") from None
    return User(found.pw_uid, found.pw_gid)


def user_for(name: str, state: Path) -> User | None:
    """Whom commands run as: nobody but ourselves, unless we are root; then `name`, who must get to its folders."""
    if os.geteuid() != 0:
        return None
    try:
        user = find_user(name)
    except CannotStart as error:
        raise ConfigError([f"HOLDFAST_PROCESS_USER is {name!r}: {error}"]) from None
    if user.uid == 0:
        return None
    shut = [folder for folder in [state.absolute(), *state.absolute().parents] if not _open_to(folder.stat(), user)]
    if shut:
        raise ConfigError(
            [
                f"HOLDFAST_STATE_DIR: commands run as user {name}, who cannot get through {shut[-1]}; use a folder "
                "such as /var/lib/holdfast, or set HOLDFAST_PROCESS_USER=root to run them as root"
            ]
        )
    return user


def _open_to(folder: os.stat_result, user: User) -> bool:
    if folder.st_uid == user.uid:
        return bool(folder.st_mode & stat.S_IXUSR)
    if folder.st_gid == user.gid:
        return bool(folder.st_mode & stat.S_IXGRP)
    return bool(folder.st_mode & stat.S_IXOTH)
