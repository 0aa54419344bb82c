"""PgQueuer for comparison: its own virtual environment and database, and its best documented settings.

uvloop, batches of 1,000, one connection per worker as its own benchmark has it. What it keeps of a job is a log row for
each change of status; by those of `successful` it is measured, as we are by `finished_at`.
"""

import asyncio
import subprocess
import sys
from pathlib import Path

import asyncpg

VERSION = "1.6.0"
PACKAGES = (f"pgqueuer[asyncpg]=={VERSION}", "uvloop==0.23.0", "asyncpg==0.32.0")
PROGRAM = Path(__file__).parent / "pgqueuer_worker.py"
BATCH = 1000


def environment() -> Path:
    """Make its virtual environment, once, beside ours; return its Python."""
    folder = Path(sys.prefix) / "peers" / f"pgqueuer-{VERSION}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not ready.exists():
        _must(sys.executable, "-m", "venv", str(folder))
        _must(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *PACKAGES)
        ready.touch()
    return python


def _must(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")


class PgQueuer:
    """A database with PgQueuer in it."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._python = environment()

    async def _run(self, *arguments: str) -> None:
        done = await asyncio.create_subprocess_exec(str(self._python), str(PROGRAM), self._url, *arguments)
        if await done.wait() != 0:
            raise RuntimeError(f"PgQueuer: {arguments[0]} failed")

    async def install(self) -> None:
        await self._run("install")

    async def drain(self, count: int) -> float:
        """Let one worker empty a backlog of no-ops; return its rate."""
        await self._run("fill", str(count))
        await self._run("drain", str(BATCH))
        connection = await asyncpg.connect(self._url)
        try:
            row = await connection.fetchrow(
                "WITH ends AS (SELECT created AS at FROM pgqueuer_log WHERE status = 'successful'),"
                " span AS (SELECT min(at) AS first, max(at) AS last, count(*) AS n FROM ends)"
                "SELECT n, (SELECT count(*) FROM ends WHERE at > first) / extract(epoch FROM last - first)::float8"
                " AS rate FROM span"
            )
            await connection.execute("TRUNCATE pgqueuer_log")
            assert row is not None
            assert row["n"] == count
            return float(row["rate"])
        finally:
            await connection.close()
