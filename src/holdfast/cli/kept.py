"""A command that leaves when the process that started it is gone: `python -m holdfast.cli.kept FD command …`.

FD is the read end of a pipe that only the starter holds open. However the starter ends, kill -9 included, the kernel
closes its end, even if it ends before this process has begun to look. Then this process gets a SIGTERM, and leaves in
order: a worker hands over what it runs.
"""

import os
import signal
import sys
import threading


def main() -> None:
    keeper = int(sys.argv.pop(1))
    os.set_inheritable(keeper, False)
    threading.Thread(target=_leave_with, args=(keeper,), name="holdfast-keeper", daemon=True).start()
    from holdfast.cli.main import app  # It takes a while, and the starter may be gone by then.

    app(prog_name="holdfast")


def _leave_with(keeper: int) -> None:
    while os.read(keeper, 1):
        pass  # Nothing is ever written: only its end is news.
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
