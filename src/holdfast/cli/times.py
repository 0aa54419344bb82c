"""Times and delays as people type them: `2026-05-01T12:00`, `90`, `10min`, `2h`, `7d`."""

import re
from datetime import UTC, datetime, timedelta

import typer

UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400}
_DELAY = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|)")


def moment(option: str, text: str) -> datetime:
    """Parse a time; without a zone it is this machine's local time."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except (ValueError, OverflowError):
        raise typer.BadParameter(
            f"{text!r} is not a time; write it like 2026-05-01, 2026-05-01T12:00 or 2026-05-01T12:00Z",
            param_hint=option,
        ) from None


def seconds(option: str, text: str) -> float:
    """Parse a delay: a number of seconds, or a number with the unit s, min, h or d."""
    found = _DELAY.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a delay; write it like 90, 90s, 10min, 2h or 7d", param_hint=option)
    return float(found[1]) * UNITS[found[2]]


def after(option: str, text: str) -> datetime:
    """Return the time after a delay from now."""
    try:
        return datetime.now(UTC) + timedelta(seconds=seconds(option, text))
    except OverflowError:
        raise typer.BadParameter(f"{text!r} is too far away", param_hint=option) from None


def moment_or_delay(option: str, text: str) -> datetime:
    return after(option, text) if _DELAY.fullmatch(text.strip()) else moment(option, text)
