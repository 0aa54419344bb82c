"""Parses the value of one setting, from text or TOML; raises ValueError with what is accepted."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from holdfast.spec_checks import UNITS

MOST_UID = 2**32 - 2
"""The largest id of a user or group; one more means "none" to the kernel."""

Pooler = Literal["none", "transaction"]
"""What is between us and Postgres: nothing that matters to us, or a pooler in transaction mode."""

Switch = Literal["on", "off"]
OnDisconnect = Literal["continue", "cancel"]


def parse_number(text: object) -> float:
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise ValueError("is not a number")
    number = float(text)
    if not 0 < number < 1e12:
        raise ValueError("must be greater than 0")
    return number


def parse_whole(text: object) -> int:
    number = parse_number(text)
    if number != int(number):
        raise ValueError("must be a whole number")
    return int(number)


def parse_flag(text: object) -> bool:
    if isinstance(text, bool):
        return text
    match str(text).lower():
        case "true" | "1" | "yes" | "on":
            return True
        case "false" | "0" | "no" | "off":
            return False
    raise ValueError("must be true or false")


def parse_text(text: object) -> str:
    if not isinstance(text, str) or not text:
        raise ValueError("must be text")
    return text


def parse_path(text: object) -> Path:
    return Path(parse_text(str(text))).expanduser()


def parse_uid_range(text: object) -> str:
    found = re.fullmatch(r"([1-9][0-9]{0,9})-([1-9][0-9]{0,9})", str(text))
    if not found or not int(found[1]) <= int(found[2]) <= MOST_UID:
        raise ValueError(f"must be two uids, such as 2100000000-2100065535, from 1 to {MOST_UID}")
    return str(text)


def parse_size(text: object) -> str:
    if not re.fullmatch(r"[0-9]+[kmgKMG]?", str(text)):
        raise ValueError("must be a number of bytes, such as 512m or 1g")
    return str(text)


def parse_bytes(text: object) -> int:
    """Parse a number of bytes, also with a unit: 4096, 512m, 1g."""
    if isinstance(text, int) and not isinstance(text, bool):
        return parse_whole(text)
    size = parse_size(text)
    return parse_whole(int(size.rstrip("kmgKMG")) * UNITS.get(size[-1].lower(), 1))


def parse_pooler(text: object) -> Pooler:
    match text:
        case "none" | "transaction":
            return text
    raise ValueError("must be none or transaction")


def parse_switch(text: object) -> Switch:
    match text:
        case "on" | "off":
            return text
        case True:
            return "on"
        case False:
            return "off"
    raise ValueError("must be on or off")


def parse_on_disconnect(text: object) -> OnDisconnect:
    match text:
        case "continue" | "cancel":
            return text
    raise ValueError("must be continue or cancel")


def parse_port(text: object) -> int:
    try:
        port = int(str(text))
    except ValueError:
        port = -1
    if not 0 <= port <= 65_535:
        raise ValueError("must be a port, 0 to 65535")
    return port


def optional(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda text: None if text in (None, "", "none") else parse(text)
