"""CPU and memory of processes, from /proc."""

import os
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
PARENT, SESSION, UTIME, STIME, CUTIME, CSTIME = 1, 3, 11, 12, 13, 14
"""Places in /proc/PID/stat after the command's name."""


def _stat(pid: int) -> list[str] | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _all() -> list[tuple[int, list[str]]]:
    found = ((int(entry), _stat(int(entry))) for entry in os.listdir("/proc") if entry.isdigit())
    return [(pid, stat) for pid, stat in found if stat is not None]


def session(leader: int) -> list[int]:
    """The processes of a session: what a process that was started with one of its own has started since."""
    return [pid for pid, stat in _all() if int(stat[SESSION]) == leader]


def session_cpu(leader: int) -> float:
    """CPU seconds of a session's processes, and of those children of its leader that have ended."""
    total = 0
    for pid, stat in _all():
        if int(stat[SESSION]) == leader:
            total += int(stat[UTIME]) + int(stat[STIME])
            if pid == leader:
                total += int(stat[CUTIME]) + int(stat[CSTIME])
    return total / TICK


def server_cpu(server: int, *, without: int = 0) -> float:
    """CPU seconds of a server and its children, those that ended included; `without` leaves one child out."""
    total = 0
    for pid, stat in _all():
        if pid == server:
            total += sum(int(stat[place]) for place in (UTIME, STIME, CUTIME, CSTIME))
        elif int(stat[PARENT]) == server and pid != without:
            total += int(stat[UTIME]) + int(stat[STIME])
    return total / TICK


def memory_mb(pids: list[int]) -> float:
    """Proportional set size: memory that processes share is counted once."""
    total = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return total / 1024
