"""A command that exits with the process that started it: `python -m holdfast.cli.exit_with_parent FD command …`.

FD is the read end of a pipe that only the parent holds open. However the parent ends, kill -9 included, the kernel
closes its end, even if that happens before this process reads it. Then this process sends itself a SIGTERM and exits
cleanly: a worker hands over its attempts.
"""

import os
import signal
import sys
import threading


def main() -> None:
    keeper = int(sys.argv.pop(1))
    os.set_inheritable(keeper, False)
    threading.Thread(target=_leave_with, args=(keeper,), name="holdfast-keeper", daemon=True).start()
    from holdfast.cli.main import app  # The import takes a while, and the parent may be gone by then.

    app(prog_name="holdfast")


def _leave_with(keeper: int) -> None:
    while os.read(keeper, 1):
        pass  # Nothing is ever written: the read returns only at the end.
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
