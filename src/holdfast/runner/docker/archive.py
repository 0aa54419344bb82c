"""Tar archives, in which the engine's API copies files into and out of containers."""

import io
import tarfile
import time
from collections.abc import AsyncIterator

BLOCK = tarfile.BLOCKSIZE
PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


class Archive:
    """A tar archive that is being built. Owners are numeric: the engine does not look up names."""

    def __init__(self, uid: int, gid: int) -> None:
        self._uid = uid
        self._gid = gid
        self._bytes = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._bytes, mode="w", format=tarfile.GNU_FORMAT)  # noqa: SIM115
        self._now = int(time.time())

    def folder(self, name: str, mode: int = 0o700, *, at: int | None = None) -> None:
        """Add a folder, optionally with a given modification time."""
        entry = self._entry(name, mode)
        entry.type = tarfile.DIRTYPE
        entry.mtime = self._now if at is None else at
        self._tar.addfile(entry)

    def file(self, name: str, data: bytes, mode: int = 0o600, *, owned_by_root: bool = False) -> None:
        """Add a file. With `owned_by_root` it belongs to root, so that the user cannot change it."""
        entry = self._entry(name, mode)
        entry.size = len(data)
        if owned_by_root:
            entry.uid = entry.gid = 0
        self._tar.addfile(entry, io.BytesIO(data))

    def _entry(self, name: str, mode: int) -> tarfile.TarInfo:
        entry = tarfile.TarInfo(name)
        entry.mode, entry.mtime, entry.uid, entry.gid = mode, self._now, self._uid, self._gid
        return entry

    def finish(self) -> bytes:
        self._tar.close()
        return self._bytes.getvalue()


async def only_file(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the bytes of the first file in a tar stream. A stream may end early: the file grew meanwhile."""
    buffer = b""
    left: int | None = None
    skip = 0
    async for chunk in chunks:
        buffer += chunk
        while left is None:
            cut = min(skip, len(buffer))
            buffer, skip = buffer[cut:], skip - cut
            if skip or len(buffer) < BLOCK:
                break
            entry = tarfile.TarInfo.frombuf(buffer[:BLOCK], "utf-8", "surrogateescape")
            buffer = buffer[BLOCK:]
            if entry.type in PLAIN:
                left = entry.size
            else:  # A long name or an extended header: not needed here.
                skip = -(-entry.size // BLOCK) * BLOCK
        if left is not None:
            piece, buffer = buffer[:left], b""
            left -= len(piece)
            if piece:
                yield piece
            if not left:
                return
