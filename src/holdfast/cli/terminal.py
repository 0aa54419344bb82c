"""Text of jobs and servers on a terminal: control characters are shown, not interpreted.

Output, names and errors of a job may have escape sequences that rename the window, write to the clipboard, or hide and
forge lines. On a terminal each control character becomes visible (`\\x1b`). Colours of log lines stay, reset at the end
of their line. If the output is not a terminal, text passes unchanged, so `holdfast logs ID | cat -v` and
`holdfast logs ID > file` get everything that the job wrote.
"""

import re
import sys
from typing import IO

import typer

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
"""All control characters but tab and newline, and those that change the text direction."""
_COLOUR = re.compile(r"(\x1b\[[0-9;]{0,40}m)")
_CONCEALED = re.compile(r"[\[;]0*8[;m]")
_RESET = "\x1b[0m"


def visible(text: str) -> str:
    """Return text with every control character but tab and newline made visible."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def visible_line(line: str) -> str:
    """Return a line of a job's log like `visible`, but keep its colours."""
    parts = _COLOUR.split(line.removesuffix("\r"))
    if len(parts) == 1:
        return visible(parts[0])
    return "".join(_colour(part) if n % 2 else visible(part) for n, part in enumerate(parts)) + _RESET


def _colour(sequence: str) -> str:
    """Keep a sequence that sets colours and weights, unless it conceals text."""
    return visible(sequence) if _CONCEALED.search(sequence) else sequence


def visible_json(text: str) -> str:
    """Return equivalent JSON in which control characters are JSON escapes."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def write_line(stream: IO[str], line: str) -> None:
    """Write a line of a job's log."""
    stream.write(f"{visible_line(line) if stream.isatty() else line}\n")


def say(text: str, *, err: bool = False) -> None:
    """Print text that may come from a job or a server."""
    stream = sys.stderr if err else sys.stdout
    typer.echo(visible(text) if stream.isatty() else text, err=err)
