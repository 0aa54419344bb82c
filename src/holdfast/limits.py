"""Limits of one attempt: memory, processes, the size of one file, the size of its folder.

Settings give a default and a ceiling for each; a spec asks for less, or for more up to the ceiling. None is no limit.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from holdfast.errors import Invalid
from holdfast.spec_checks import UNITS

SIZES = ("memory", "file_size", "folder_size")
FILES = ("file_size", "folder_size")
"""The limits that also apply to containers; the engine enforces their memory and processes."""
NAMES = ("memory", "pids", *FILES)
SETTINGS = {
    "memory": "HOLDFAST_PROCESS_MEMORY",
    "pids": "HOLDFAST_PROCESS_PIDS",
    "file_size": "HOLDFAST_FILE_SIZE",
    "folder_size": "HOLDFAST_FOLDER_SIZE",
}
"""The settings of the defaults; the same names with `_MAX` are the ceilings."""


class AttemptLimits(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sizes in bytes, and a number of processes."""

    memory: int | None = None
    pids: int | None = None
    file_size: int | None = None
    folder_size: int | None = None


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True):
    default: AttemptLimits = AttemptLimits()
    most: AttemptLimits = AttemptLimits()

    def of(self, spec: Mapping[str, Any], names: Sequence[str] = NAMES) -> AttemptLimits:
        """Return the named limits of an attempt with this spec; raise Invalid if one is above its ceiling."""
        return AttemptLimits(**{name: self._one(name, spec.get(name)) for name in names})

    def _one(self, name: str, asked: Any) -> int | None:
        most: int | None = getattr(self.most, name)
        default: int | None = getattr(self.default, name)
        wanted = _amount(asked)
        if wanted is None:
            return most if default is None else default
        if most is not None and wanted > most:
            text = size_text(most) if name in SIZES else str(most)
            raise Invalid(f"spec.{name}", f"{asked} is more than {SETTINGS[name]}_MAX allows: {text}")
        return wanted


def _amount(asked: Any) -> int | None:
    """Parse a number, or a number of bytes such as 512m."""
    if isinstance(asked, int) and not isinstance(asked, bool):
        return asked
    if not isinstance(asked, str) or not asked.rstrip("kmgKMG").isdecimal():
        return None
    return int(asked.rstrip("kmgKMG")) * UNITS.get(asked[-1].lower(), 1)


def size_text(size: int) -> str:
    """Format a number of bytes for people."""
    for unit, bytes_in in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= bytes_in:
            return f"{size / bytes_in:.4g} {unit}"
    return f"{size} bytes"


def remedy(name: str) -> str:
    """Return what to do about a limit, for the end of a message."""
    return f"raise spec.{name} (default {SETTINGS[name]}, ceiling {SETTINGS[name]}_MAX)"
