"""A job, or its inputs, in a file: TOML or JSON, and where in it a field is."""

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.cli.session import USAGE, fail

STDIN = "-"


@dataclass(frozen=True)
class TextFile:
    """A file that describes something, its text, and the object in it."""

    name: str
    text: str
    content: dict[str, Any] = field(default_factory=dict)

    def line_of(self, path: str) -> int | None:
        """Return the line of a field, named as in an error: `retry.base`, `tasks[0].sql`."""
        name = re.escape(re.split(r"[.\[]", re.sub(r"\[\d+\]", "", path))[-1])
        wanted = re.compile(rf"""^\s*(?:.*[{{,]\s*)?(["']?){name}\1\s*[=:]|^\s*\[+(?:.*\.)?{name}\]""")
        lines = (n for n, line in enumerate(self.text.splitlines(), 1) if wanted.search(line))
        return next(lines, None)


def read_object(option: str, name: str) -> TextFile:
    """Read a file with one object: TOML if its name says so or it is not JSON; `-` is the standard input."""
    try:
        text = sys.stdin.read() if name == STDIN else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        fail(f"{option} {name}: {error.strerror}; give the path of a TOML or JSON file, or -", USAGE)
    except UnicodeDecodeError:
        fail(f"{option} {name}: is not UTF-8 text; give a TOML or JSON file", USAGE)
    content = _parse(option, name, text)
    if not isinstance(content, dict):
        fail(f"{option} {name}: must be an object with fields, not a {type(content).__name__}", USAGE)
    return TextFile(name, text, content)


def _parse(option: str, name: str, text: str) -> Any:
    import json
    import tomllib

    is_json = name.endswith(".json") or (not name.endswith(".toml") and text.lstrip()[:1] in "{[")
    try:
        return json.loads(text) if is_json else tomllib.loads(text)
    except ValueError as error:
        fail(f"{option} {name}: is not {'JSON' if is_json else 'TOML'}: {error}", USAGE)
