"""What jobs run: a shell script that keeps a journal of its own, and how a journal's line looks.

The journal is a file that children append to, a line in one write, with the kernel's uptime as their clock. A
container has no such file, and sends its lines to the harness instead.
"""

import os
from collections.abc import Mapping
from typing import Any

from torture.history import boottime

SCRIPT = r"""
n=0
note() {
  read -r now _ < /proc/uptime
  line="$1 $HOLDFAST_JOB_ID $HOLDFAST_ATTEMPT $HOLDFAST_LEASE_TOKEN $$ $now $n"
  if [ -n "$PORT" ]; then echo "$line" | nc 127.0.0.1 "$PORT"; else echo "$line" >> "$JOURNAL"; fi
}
spend() { [ "$1" = 0 ] || echo "{\"event\": \"usage\", \"tokens\": $1}"; }
note start
echo "{\"event\": \"usage\", \"runs\": 1}"
spend "${FIRST:-0}"
[ -z "$STUBBORN" ] || trap '' TERM
if [ -n "$KIN" ]; then setsid sh -c "$KIN" > /dev/null 2>&1 & fi
while [ $n -lt "$LINES" ]; do
  n=$((n + 1))
  echo "$HOLDFAST_ATTEMPT out $n"
  echo "$HOLDFAST_ATTEMPT err $n" >&2
  note tick
  spend "${EACH:-0}"
  sleep "$PACE"
done
while [ -n "$HANG" ]; do sleep 0.3; note tick; done
if [ "$CODE" = 0 ]; then
  echo "$HOLDFAST_ATTEMPT" > output/made || exit 4
  echo "{\"version\": 1, \"status\": \"succeeded\", \"result\": $HOLDFAST_ATTEMPT}" > result.json || exit 4
fi
note end
spend "${LAST:-0}"
exit "$CODE"
"""
KIN = r"""
while :; do
  read -r now _ < /proc/uptime
  echo "kin $HOLDFAST_JOB_ID $HOLDFAST_ATTEMPT $HOLDFAST_LEASE_TOKEN $$ $now 0" >> "$JOURNAL"
  sleep 0.3
done
"""
"""A descendant that leaves its session, and does not end by itself."""


def script(*, lines: int, pace: float, code: int = 0, **ways: bool) -> dict[str, Any]:
    """Return a script with this many lines per stream; it may `hang`, be `stubborn` (ignore TERM), or have `kin`.

    Each attempt uses one run, and tokens if it is told how many (`torture/token_usage.py`). One that succeeds leaves a
    file and a result, both with its number.
    """
    env = {"LINES": str(lines), "PACE": f"{pace:.2f}", "CODE": str(code), "HANG": "", "STUBBORN": "", "KIN": ""}
    env |= {name.upper(): "1" for name, so in ways.items() if so and name != "kin"}
    if ways.get("kin"):
        env["KIN"] = KIN
    return {"command": ["sh", "-c", SCRIPT], "env": env}


def note(path: str, what: str, mark: Mapping[str, Any], said: int) -> None:
    """Add a line to the journal from within Python."""
    line = f"{what} {mark['job']} {mark['attempt']} {mark['token']} {os.getpid()} {boottime():.3f} {said}\n"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        os.write(fd, line.encode())
    finally:
        os.close(fd)
