"""Secrets: looked up by name on the worker's host, given to the child at its start, masked in its output.

The value of a secret is never in the database. It is in the environment of the worker (`HOLDFAST_SECRET_NAME`) or in a
file of the secrets folder.
"""

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from holdfast.model import Error
from holdfast.runner.base import CannotStart

PREFIX = "HOLDFAST_SECRET_"
MASK = "***"
SHORTEST = 4
"""Shorter values are not masked: they would hide too much of the log, and can be guessed anyway."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")


def find_secrets(names: Iterable[str], folder: Path | None) -> dict[str, str]:
    """Look up secrets by name. Raise CannotStart for one that is missing or has an invalid name."""
    found = {}
    for name in names:
        if not NAME.fullmatch(name):
            raise CannotStart("contract_violation", f"{name!r} cannot be the name of a secret")
        value = os.environ.get(PREFIX + name)
        if value is None and folder is not None:
            try:
                value = (folder / name).read_text().removesuffix("\n")
            except (FileNotFoundError, UnicodeDecodeError):
                value = None
        if value is None:
            remedy = f"set {PREFIX}{name}, or write it to a file {name} in HOLDFAST_SECRETS_DIR"
            raise CannotStart("start_failed", f"secret {name} is not set on this worker: {remedy}")
        found[name] = value
    return found


class Mask:
    """Masks secrets in bytes, texts and data. Each line of a multi-line secret is masked separately."""

    def __init__(self, values: Iterable[str]) -> None:
        lines = {line.strip() for value in values for line in [value, *value.splitlines()]}
        known = sorted((line for line in lines if len(line) >= SHORTEST), key=len, reverse=True)
        forms = {form for line in known for form in (line, msgspec.json.encode(line).decode()[1:-1])}
        ordered = sorted(forms, key=len, reverse=True)
        self._text = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._bytes = re.compile(b"|".join(re.escape(form.encode()) for form in ordered)) if ordered else None
        self.longest = max((len(form.encode()) for form in ordered), default=0)

    def __bool__(self) -> bool:
        return self._text is not None

    def mask_bytes(self, data: bytes) -> bytes:
        return data if self._bytes is None else self._bytes.sub(MASK.encode(), data)

    def text(self, text: str) -> str:
        return text if self._text is None else self._text.sub(MASK, text)

    def data(self, value: Any) -> Any:
        """Mask secrets in every string of JSON data, including keys."""
        if self._text is None:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.data(key): self.data(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.data(item) for item in value]
        return value

    def error(self, error: Error | None) -> Error | None:
        return error and Error(code=error.code, message=self.text(error.message))

    def cut(self, data: bytes, at: int) -> int:
        """Return where to cut data: at `at`, or a little before it, so that no secret is split."""
        if self._bytes is None:
            return at
        for found in self._bytes.finditer(data, max(0, at - self.longest), at + self.longest):
            if found.start() < at < found.end():
                return found.start() or at
        return at


NO_MASK = Mask(())
