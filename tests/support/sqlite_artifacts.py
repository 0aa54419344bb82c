"""A second artifact store: all files in one SQLite file. It shows that another store is one class."""

import io
import os
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any

from holdfast.errors import NotFound, StorageUnavailable
from holdfast.runner.artifacts import Artifact, FileWriter, InputFile, OpenArtifact, StoredOutputs, outputs_name

TABLES = """
CREATE TABLE IF NOT EXISTS sets (area TEXT, owner TEXT, name TEXT, made REAL, PRIMARY KEY (area, owner, name));
CREATE TABLE IF NOT EXISTS files (area TEXT, owner TEXT, name TEXT, path TEXT, data BLOB,
                                  PRIMARY KEY (area, owner, name, path));
"""
SET = "area = ? AND owner = ? AND name = ?"
OUTPUTS, UPLOADS, INPUTS = "outputs", "uploads", "inputs"
Row = tuple[Any, ...]


class SqliteArtifacts:
    def __init__(self, file: Path) -> None:
        self._file = file
        with closing(sqlite3.connect(file)) as connection:
            connection.executescript(TABLES)

    def check_room(self) -> None:
        pass

    def writer(self, job_id: str, attempt: int, token: int) -> FileWriter:
        return SqliteWriter(self.run, OUTPUTS, job_id, outputs_name(attempt, token))

    def list(self, job_id: str, attempt: int, token: int) -> Sequence[Artifact]:
        found = self._sizes(OUTPUTS, job_id, outputs_name(attempt, token))
        return [Artifact(path=path, size=size) for path, size in sorted(found.items())]

    def open(self, job_id: str, attempt: int, token: int, path: str, *, start: int = 0) -> OpenArtifact:
        data = self._data(OUTPUTS, job_id, outputs_name(attempt, token), path)
        if data is None:
            raise NotFound("artifact", path)
        return OpenArtifact(size=len(data), content=io.BytesIO(data[start:]))

    def jobs(self, after: str, limit: int) -> Sequence[str]:
        sql = "SELECT DISTINCT owner FROM sets WHERE area = ? AND owner > ? ORDER BY 1 LIMIT ?"
        return [owner for (owner,) in self.run((sql, (OUTPUTS, after, limit)))]

    def stored(self, job_id: str) -> Sequence[StoredOutputs]:
        rows = self.run(("SELECT name, made FROM sets WHERE area = ? AND owner = ?", (OUTPUTS, job_id)))
        return [StoredOutputs(name=name, age=time.time() - made) for name, made in rows]

    def remove(self, job_id: str, name: str | None = None) -> None:
        self._remove(OUTPUTS, job_id, name)

    def upload_writer(self, tenant: str, upload: str) -> FileWriter:
        return SqliteWriter(self.run, UPLOADS, tenant, upload)

    def uploaded(self, tenant: str, upload: str) -> Mapping[str, int]:
        return self._sizes(UPLOADS, tenant, upload)

    def staged_bytes(self, tenant: str) -> int:
        sql = "SELECT coalesce(sum(length(data)), 0) FROM files WHERE area = ? AND owner = ?"
        ((size,),) = self.run((sql, (UPLOADS, tenant)))
        return int(size)

    def expire_uploads(self, older: float) -> int:
        old = self.run(("SELECT owner, name FROM sets WHERE area = ? AND made < ?", (UPLOADS, time.time() - older)))
        for owner, name in old:
            self._remove(UPLOADS, owner, name)
        return len(old)

    def link_upload(self, tenant: str, upload: str, job_id: str) -> None:
        source, target = (UPLOADS, tenant, upload), (INPUTS, job_id, upload)
        copy = f"INSERT OR IGNORE INTO files SELECT ?, ?, ?, path, data FROM files WHERE {SET}"
        self.run((copy, target + source), ("INSERT OR REPLACE INTO sets VALUES (?, ?, ?, ?)", (*target, time.time())))
        if not self._sizes(*target):
            raise NotFound("upload", upload)

    def inputs(self, job_id: str, upload: str) -> Mapping[str, InputFile]:
        def opener(path: str) -> Callable[[], IO[bytes]]:
            return lambda: io.BytesIO(self._data(INPUTS, job_id, upload, path) or b"")

        sizes = self._sizes(INPUTS, job_id, upload)
        return {path: InputFile(size=size, open=opener(path)) for path, size in sizes.items()}

    def jobs_with_inputs(self, *, after: str, limit: int, older: float) -> Sequence[str]:
        sql = "SELECT owner FROM sets WHERE area = ? AND owner > ? GROUP BY 1 HAVING max(made) < ? ORDER BY 1 LIMIT ?"
        return [owner for (owner,) in self.run((sql, (INPUTS, after, time.time() - older, limit)))]

    def remove_inputs(self, job_id: str) -> None:
        self._remove(INPUTS, job_id)

    def delete_job(self, job_id: str) -> str | None:
        self._remove(OUTPUTS, job_id)
        self._remove(INPUTS, job_id)
        return None

    def run(self, *statements: tuple[str, Row]) -> Sequence[Row]:
        """Run statements in one transaction; return the rows of the last."""
        if not self._file.exists():
            raise StorageUnavailable(f"{self._file} is gone")
        with closing(sqlite3.connect(self._file, timeout=30)) as connection, connection:
            rows: Sequence[Row] = []
            for sql, values in statements:
                rows = connection.execute(sql, values).fetchall()
            return rows

    def _sizes(self, *key: str) -> Mapping[str, int]:
        return dict(self.run((f"SELECT path, length(data) FROM files WHERE {SET} AND data IS NOT NULL", key)))

    def _data(self, *key: str) -> bytes | None:
        rows = self.run((f"SELECT data FROM files WHERE {SET} AND path = ?", key))
        return rows[0][0] if rows else None

    def _remove(self, area: str, owner: str, name: str | None = None) -> None:
        values = (area, owner, name)
        self.run(*((f"DELETE FROM {table} WHERE area = ? AND owner = ? AND name = coalesce(?, name)", values)
                   for table in ("files", "sets")))  # fmt: skip


class SqliteWriter:
    def __init__(self, run: Callable[..., Sequence[Row]], area: str, owner: str, name: str) -> None:
        self._run = run
        self._target = (area, owner, name)
        self._key = (area, owner, f".{name}.{os.urandom(4).hex()}")

    def folder(self, name: str) -> None:
        self._add(name, None)

    def create(self, name: str) -> IO[bytes]:
        below = f"SELECT 1 FROM files WHERE {SET} AND substr(path, 1, ?) = ?"
        if self.has(name) or self._run((below, (*self._key, len(name) + 1, f"{name}/"))):
            raise FileExistsError(name)
        self._add(name, b"")
        return NewFile(lambda data: self._add(name, data))

    def has(self, name: str) -> bool:
        above = [str(folder) for folder in PurePosixPath(name).parents][:-1]
        rows: dict[str, int] = dict(self._run((f"SELECT path, data IS NOT NULL FROM files WHERE {SET}", self._key)))
        return name in rows or any(path.startswith(f"{name}/") for path in rows) or any(map(rows.get, above))

    def open(self, name: str) -> IO[bytes] | None:
        rows = self._run((f"SELECT data FROM files WHERE {SET} AND path = ?", (*self._key, name)))
        return io.BytesIO(rows[0][0]) if rows and rows[0][0] is not None else None

    def drop(self, name: str) -> int:
        file = self.open(name)
        assert file is not None
        self._run((f"DELETE FROM files WHERE {SET} AND path = ?", (*self._key, name)))
        return len(file.read())

    def publish(self) -> None:
        self._run(
            *((f"DELETE FROM {table} WHERE {SET}", self._target) for table in ("files", "sets")),
            *((f"UPDATE {table} SET name = ? WHERE {SET}", (self._target[2], *self._key))
              for table in ("files", "sets")),
        )  # fmt: skip

    def discard(self) -> None:
        with suppress(StorageUnavailable):
            self._run(*((f"DELETE FROM {table} WHERE {SET}", self._key) for table in ("files", "sets")))

    def _add(self, name: str, data: bytes | None) -> None:
        self._run(
            ("INSERT OR IGNORE INTO sets VALUES (?, ?, ?, ?)", (*self._key, time.time())),
            ("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?)", (*self._key, name, data)),
        )


class NewFile(io.BytesIO):
    """Stores its content when it is closed."""

    def __init__(self, store: Callable[[bytes], None]) -> None:
        super().__init__()
        self._store = store

    def close(self) -> None:
        if not self.closed:
            self._store(self.getvalue())
        super().close()
