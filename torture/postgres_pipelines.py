"""Pipelines with a Postgres in their workspace: what their tasks run, and what a snapshot of theirs holds.

Few, as each begins with a new cluster; on hosts that have room for it.
"""

import contextlib
import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import Any

from holdfast.pipeline.connectors.postgres import programs
from holdfast.pipeline.snapshots import SnapshotFolders
from holdfast.pipeline.throwaway import ServerFailed, throwaway
from holdfast.runner.attempt_users import AttemptUsers
from holdfast.runner.base import CannotStart
from holdfast.runner.users import find_user

QUEUE = "servers"
USER = "postgres"
MADE = "SELECT step FROM made ORDER BY n"
SCRIPT = rf"""
n=0
note() {{
  read -r now _ < /proc/uptime
  echo "$1 $HOLDFAST_JOB_ID $HOLDFAST_ATTEMPT $HOLDFAST_LEASE_TOKEN $$ $now $n $TRAIL" >> "$JOURNAL"
}}
note start
psql -X -q -v ON_ERROR_STOP=1 -c "CREATE TABLE IF NOT EXISTS made (n serial, step text)" 2> /dev/null || exit 4
[ "$(psql -X -At -c "{MADE}")" = "$STEPS" ] || note spoilt
psql -X -q -v ON_ERROR_STOP=1 -c "INSERT INTO made (step) VALUES ('$TRAIL')" || exit 4
while [ $n -lt "$LINES" ]; do
  n=$((n + 1))
  echo "$HOLDFAST_ATTEMPT $TRAIL out $n"
  note tick
  sleep 0.1
done
note end
"""


def possible() -> bool:
    """Whether this host has a Postgres, and we may run it as its user."""
    with contextlib.suppress(CannotStart, KeyError):
        return os.geteuid() == 0 and bool(programs()) and bool(pwd.getpwnam(USER)) and shutil.which("psql") is not None
    return False


def task(trail: str, before: list[str], lines: int, journal: str) -> dict[str, Any]:
    env = {"TRAIL": trail, "STEPS": "\n".join(before), "LINES": str(lines), "JOURNAL": journal}
    return {"name": trail, "command": ["sh", "-c", SCRIPT], "env": env}


def rows_of(folders: SnapshotFolders, snapshot: str, folder: str, digest: str, runs: Path) -> dict[str, str]:
    """What a server says that was started from a snapshot, as if it were a file."""
    try:
        users = AttemptUsers(find_user(USER), None, runs)
        with throwaway(folders, snapshot, folder, digest, runs, users) as server:
            done = subprocess.run(
                ["psql", "-X", "-At", "-c", MADE, server.dsn], capture_output=True, text=True, check=False
            )
            return {"made": done.stdout, **({"error": done.stderr} if done.returncode else {})}
    except ServerFailed as error:
        return {"error": str(error)}
