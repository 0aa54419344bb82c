"""Text of jobs and servers on a terminal: control characters are shown, not obeyed.

A job's output, names and errors may hold escape sequences that rename the window, write to the clipboard, or hide and
forge lines. On a terminal each control character becomes visible (`\\x1b`). Colours of log lines stay, reset at the end
of their line. Where the output is no terminal it is passed on byte by byte, so `holdfast logs ID | cat -v` and
`holdfast logs ID > file` have all that the job wrote.
"""

import re
import sys
from typing import IO

import typer

_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]")
"""All control characters but tab and newline, and those that turn the direction of what follows."""
_COLOUR = re.compile(r"(\x1b\[[0-9;]{0,40}m)")
_CONCEALED = re.compile(r"[\[;]0*8[;m]")
_RESET = "\x1b[0m"


def visible(text: str) -> str:
    """Text with every control character but tab and newline spelled out."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def visible_line(line: str) -> str:
    """A line of a job's log: as `visible`, but with its colours."""
    parts = _COLOUR.split(line.removesuffix("\r"))
    if len(parts) == 1:
        return visible(parts[0])
    return "".join(_colour(part) if n % 2 else visible(part) for n, part in enumerate(parts)) + _RESET


def _colour(sequence: str) -> str:
    """A sequence that sets colours and weights; one that conceals text would hide what stands there."""
    return visible(sequence) if _CONCEALED.search(sequence) else sequence


def visible_json(text: str) -> str:
    """JSON with the same meaning, in which JSON's own escapes stand for what a terminal would obey."""
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def write_line(stream: IO[str], line: str) -> None:
    """Write a line of a job's log."""
    stream.write(f"{visible_line(line) if stream.isatty() else line}\n")


def say(text: str, *, err: bool = False) -> None:
    """Print text that a job or a server may have a part in."""
    stream = sys.stderr if err else sys.stdout
    typer.echo(visible(text) if stream.isatty() else text, err=err)
