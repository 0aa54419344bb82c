"""Values of options: `name=value`, numbers, and text that is JSON or not."""

from typing import Any

from holdfast.cli.session import USAGE, fail


def pairs(option: str, texts: list[str] | None) -> dict[str, str]:
    """Parse the values of an option that takes name=value."""
    found = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            fail(f"{option} {text!r}: use name=value", USAGE)
        found[name] = value
    return found


def numbers(option: str, texts: list[str]) -> dict[str, float]:
    """Parse the values of an option that takes name=number."""
    return {name: number(option, name, text) for name, text in pairs(option, texts).items()}


def number(option: str, name: str, text: str) -> float:
    try:
        return int(text) if text.lstrip("-").isdigit() else float(text)
    except ValueError:
        fail(f"{option} {name}={text}: {text!r} is not a number", USAGE)


def parse_value(text: str) -> Any:
    """Return a value that is JSON parsed, any other as text."""
    import json

    try:
        return json.loads(text)
    except ValueError:
        return text
