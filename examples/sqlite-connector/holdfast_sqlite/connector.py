"""The connector `sqlite`: the database is `data.db` in the workspace; no server runs, so nothing has to be stopped."""

import sqlite3
from pathlib import Path

from holdfast.pipeline.connectors.base import WorkspaceNotConsistent, command_of, path_variables, sql_file
from holdfast.pipeline.plan import TaskPlan
from holdfast.runner.wire import WireTask
from holdfast.runner.workspace import WorkspacePaths

DATABASE = "data.db"
JOURNALS = (f"{DATABASE}-journal", f"{DATABASE}-wal")
RUN = """
import pathlib, sqlite3, sys
with sqlite3.connect(sys.argv[1]) as database:
    database.executescript("BEGIN;" + pathlib.Path(sys.argv[2]).read_text() + ";COMMIT")
database.close()
"""
"""Runs a file as one transaction: a task that fails or is killed leaves nothing of itself."""


class SqliteConnector:
    serves = False

    def engine(self) -> str:
        """Return the version of the library: snapshots of another one are not reused."""
        return f"SQLite {sqlite3.sqlite_version}"

    def service(self, paths: WorkspacePaths) -> None:
        return None

    def task(self, plan: TaskPlan, paths: WorkspacePaths) -> WireTask:
        database = f"{paths.tree}/{DATABASE}"
        if plan.sql is None:
            return command_of(plan, paths, DATABASE=database)
        return WireTask(
            name=plan.name,
            argv=("python3", "-c", RUN, database, sql_file(plan, paths)),
            env={**plan.env, **path_variables(paths)},
            cwd=paths.tree,
            timeout=plan.timeout,
        )

    def prepare(self, tree: Path, uid: int) -> bool:
        return False

    def ready(self, tree: Path) -> bool:
        return True

    def check_quiet(self, tree: Path) -> None:
        """Refuse a database that a killed writer left in the middle of a transaction: its copy needs the journal."""
        for name in JOURNALS:
            if (tree / name).exists():
                raise WorkspaceNotConsistent(f"a writer of the database was killed: there is {name}")
