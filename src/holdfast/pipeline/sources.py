"""Reads the files that tasks name: declared files, and SQL with the files that it includes.

Paths are below one folder per tenant, and no link leads out of it. SQL is expanded as psql would read it:
`\\i` from the folder, `\\ir` from the including file; inside strings, comments and COPY data a backslash is only text.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import msgspec

from holdfast.errors import Invalid, TooLarge
from holdfast.permissions import make_file, make_folder

MAX_SQL = 64 * 1024 * 1024
BLOCK = 1024 * 1024
SOURCES = "sources"

_TOKEN = re.compile(
    r"""
    (?P<skip> --[^\n]* | "(?:[^"]|"")*(?:"|\Z) | (?<!\w)[eE]'(?:[^'\\]|\\.|'')*(?:'|\Z) | '(?:[^']|'')*(?:'|\Z)
      | (?P<dollar>(?<![\w$])\$(?:[A-Za-z_\x80-\uffff][\w\x80-\uffff]*)?\$) )
    | (?P<block> /\*)
    | (?P<include> \\(?P<verb>include_relative|include|ir|i)(?=[ \t]) (?P<argument>[^\n\\]*) )
    | (?P<meta> \\(?: (?:!|\?|(?:copy|help|h|ef|ev|sf|sv)\b)[^\n]* | (?!;)[^\n\\]* ) )
    | (?P<end> ; )
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMENT = re.compile(r"/\*|\*/")
_COPY = re.compile(r"\s*copy\b.*\bfrom\s+stdin\b", re.IGNORECASE | re.DOTALL)
_COPY_END = re.compile(r"^\\\.[ \t]*$", re.MULTILINE)


class LineOrigin(msgspec.Struct, frozen=True, array_like=True):
    """The lines of an expanded text from `at` on are those of `path` from `line` on."""

    at: int
    path: str
    line: int


class DeclaredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A declared file as it was when the plan was made."""

    path: str
    digest: str
    size: int


def inputs_of(shared: Path, tenant: str) -> Path:
    """Return the folder that a tenant's pipelines read; any tenant name gives exactly one folder name."""
    name = quote(tenant, safe="")
    return shared / SOURCES / (name.replace(".", "%2E") if set(name) == {"."} else name)


class Sources:
    """Reads below one folder. Every error names the field that asked for the file."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def declared(self, field: str, path: str) -> DeclaredFile:
        whole, size = hashlib.sha256(), 0
        for block in self.blocks(field, path):
            whole.update(block)
            size += len(block)
        return DeclaredFile(path=path, digest=whole.hexdigest(), size=size)

    def copy(self, field: str, file: DeclaredFile, target: Path) -> None:
        """Copy a declared file; refuse one that changed since the plan was made."""
        whole = hashlib.sha256()
        make_folder(target.parent)
        make_file(target)
        with target.open("wb") as copy:
            for block in self.blocks(field, file.path):
                whole.update(block)
                copy.write(block)
        if whole.hexdigest() != file.digest:
            target.unlink()
            raise Invalid(field, f"{file.path} changed since the plan was made; submit or resume the job once more")

    def sql(self, field: str, path: str) -> tuple[str, tuple[LineOrigin, ...]]:
        """Return a file of SQL with its includes expanded, and where its lines come from."""
        expansion = _Expansion(self, field)
        return expansion.expand(path, ()), tuple(expansion.origins)

    def blocks(self, field: str, path: str) -> Iterator[bytes]:
        """Return the content of a file."""
        try:
            with open(self.locate(field, path), "rb", opener=_no_waiting) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise Invalid(field, f"{path} is not a file")
                while block := file.read(BLOCK):
                    yield block
        except OSError as error:
            raise Invalid(field, f"{path} cannot be read: {error.strerror}") from None

    def locate(self, field: str, path: str) -> Path:
        """Resolve a path to an existing file below the folder."""
        try:
            root = self.root.resolve()
            found = (root / path).resolve(strict=True)
        except PermissionError as error:
            raise Invalid(field, f"{path} cannot be read: {error.strerror}") from None
        except (OSError, ValueError, RuntimeError):
            raise Invalid(field, f"there is no file {path} in {self.root}") from None
        if not found.is_relative_to(root):
            raise Invalid(field, f"{path} leads out of {self.root}")
        if not found.is_file():
            raise Invalid(field, f"{path} is not a file")
        return found


def _no_waiting(path: str, flags: int) -> int:
    """Open without following a link that was created meanwhile, and without waiting for a FIFO's writer."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


class _Expansion:
    """Expands one file of SQL to a single text."""

    def __init__(self, sources: Sources, field: str) -> None:
        self._sources = sources
        self._field = field
        self._left = MAX_SQL
        self._line = 1
        self.origins: list[LineOrigin] = []

    def expand(self, path: str, above: tuple[Path, ...]) -> str:
        found = self._sources.locate(self._field, path)
        if found in above:
            root = self._sources.root.resolve()
            loop = " → ".join(str(file.relative_to(root)) for file in (*above[above.index(found) :], found))
            raise Invalid(self._field, f"files include each other in a circle: {loop}")
        text = self._read(path)
        return "".join(self._pieces(text, path, found, (*above, found)))

    def _read(self, path: str) -> str:
        data = bytearray()
        for block in self._sources.blocks(self._field, path):
            data += block
            self._left -= len(block)
            if self._left < 0:
                raise TooLarge(self._field, f"over {MAX_SQL} bytes of SQL with what it includes")
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise Invalid(self._field, f"{path} is not UTF-8: {error.reason} at byte {error.start}") from None

    def _from(self, text: str, start: int, end: int, path: str) -> str:
        """Add a piece of a file, which starts a new line of the text."""
        piece = text[start:end]
        if piece:
            self.origins.append(LineOrigin(self._line, os.path.normpath(path), text.count("\n", 0, start) + 1))
            self._line += piece.count("\n")
        return piece

    def _ended(self, text: str) -> str:
        whole = _whole_line(text)
        self._line += len(whole) - len(text)
        return whole

    def _pieces(self, text: str, path: str, file: Path, above: tuple[Path, ...]) -> Iterator[str]:
        done = statement = at = 0
        while token := _TOKEN.search(text, at):
            at = token.end()
            if token["include"]:
                yield self._ended(self._from(text, done, token.start(), path))
                included = self.expand(self._target(token["verb"], token["argument"], file), above)
                yield self._ended(included)
                done = at
            elif token["block"]:
                at = _comment_end(text, at)
            elif token["dollar"]:
                at = _after(text, token["dollar"], at)
            elif token["end"]:
                if _COPY.match(text, statement, at):
                    data_end = _COPY_END.search(text, at)
                    at = data_end.end() if data_end else len(text)
                statement = at
        yield self._from(text, done, len(text), path)

    def _target(self, verb: str, argument: str, file: Path) -> str:
        name = argument.strip().rstrip(";").rstrip()
        quoted = re.fullmatch(r"'((?:[^']|'')*)'", name)
        if quoted:
            name = quoted[1].replace("''", "'")
        elif not name or re.search(r"[\s'\":`|]", name):
            raise Invalid(self._field, f"{file.name}: \\{verb} {argument.strip()} cannot be read without running it")
        if verb in ("ir", "include_relative"):
            return str(file.parent.relative_to(self._sources.root.resolve()) / name)
        return name


def _whole_line(text: str) -> str:
    """End the line of a backslash command before the following text."""
    return text if not text or text.endswith("\n") else text + "\n"


def _after(text: str, delimiter: str, at: int) -> int:
    found = text.find(delimiter, at)
    return len(text) if found < 0 else found + len(delimiter)


def _comment_end(text: str, at: int) -> int:
    """Return where a comment ends; comments nest."""
    depth = 1
    for token in _COMMENT.finditer(text, at):
        depth += 1 if token[0] == "/*" else -1
        if depth == 0:
            return token.end()
    return len(text)
