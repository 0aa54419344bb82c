"""`python -m scripts.mutation.bounded SECONDS COMMAND…`: run a command with a time limit, and leave nothing running.

Supervisors outlive the worker that started them, by design. Here they become children of this process (a subreaper) and
are killed with the rest. The exit code is the command's, or 124 if the time was over.
"""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

TIMED_OUT = 124
PR_SET_CHILD_SUBREAPER = 36
PR_SET_PDEATHSIG = 1


def main() -> int:
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TIMED_OUT))
    process = subprocess.Popen(sys.argv[2:], start_new_session=True)
    try:
        return process.wait(float(sys.argv[1]))
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    finally:
        kill_descendants()


def kill_descendants() -> None:
    """Kill until none is left: the orphans of those that die become our children."""
    while found := descendants(os.getpid()):
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.02)


def descendants(pid: int) -> list[int]:
    """All processes below one, from /proc."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found, ahead = [], [pid]
    while ahead:
        below = children.get(ahead.pop(), [])
        found += below
        ahead += below
    return found


if __name__ == "__main__":
    sys.exit(main())
