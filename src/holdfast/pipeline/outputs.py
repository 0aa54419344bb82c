"""Files that the tasks of a pipeline left in `output/`, listed and copied by a manifest of paths, sizes and digests."""

import hashlib
import os
from pathlib import Path
from typing import IO

from holdfast.model import OutputFile, Outputs
from holdfast.runner.collected_outputs import BLOCK, CollectedOutputs


class ContentDiffers(Exception):
    """A stored file differs from its manifest."""


def files_in(folder: Path) -> tuple[OutputFile, ...]:
    """List the files below a folder of collected outputs, sorted by path; none if there is no folder."""
    paths = sorted(Path(top, name) for top, _, names in os.walk(folder) for name in names)
    return tuple(_file(path, str(path.relative_to(folder))) for path in paths)


def _file(path: Path, name: str) -> OutputFile:
    return OutputFile(path=name, size=path.stat().st_size, sha256=digest_of(path))


def digest_of(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def copy_outputs(folder: Path, outputs: Outputs, collected: CollectedOutputs) -> None:
    """Collect the stored files of a manifest, except those whose names are already collected."""
    for file in outputs.files:
        if collected.has(file.path):
            continue
        with (folder / file.path).open("rb") as source:
            checked = _Checked(source)
            collected.file(file.path, checked)  # type: ignore[arg-type]
        if (checked.size, checked.digest.hexdigest()) != (file.size, file.sha256):
            raise ContentDiffers(f"{file.path} is not what was stored")


class _Checked:
    """A file whose content is hashed while it is read."""

    def __init__(self, source: IO[bytes]) -> None:
        self._source = source
        self.size = 0
        self.digest = hashlib.sha256()

    def read(self, most: int = BLOCK) -> bytes:
        block = self._source.read(most)
        self.size += len(block)
        self.digest.update(block)
        return block
