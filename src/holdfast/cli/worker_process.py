"""One process of `holdfast worker --processes N`, started by its parent: see `worker_processes.py`.

`python -m holdfast.cli.worker_process PARENT READY --queue …`: PARENT is the parent's pid. The process writes to the
file descriptor READY when it works. It drains at a signal and is killed with its parent.
"""

import argparse
import ctypes
import logging
import os
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("parent", type=int)
    parser.add_argument("ready", type=int)
    parser.add_argument("--queue", required=True)
    parser.add_argument("--worker-id", required=True)
    parser.add_argument("--app")
    parser.add_argument("--once", action="store_true")
    options = parser.parse_args()
    die_with(options.parent)
    os.set_inheritable(options.ready, False)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s [%(process)d] %(name)s: %(message)s")
    sys.exit(_work(options))


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, whatever it is doing; exit if that has happened."""
    ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


def _work(options: argparse.Namespace) -> int:
    import typer

    from holdfast.cli import worker_command
    from holdfast.cli.queue_option import parse_queues
    from holdfast.cli.session import run

    def tell_ready() -> None:
        os.write(options.ready, b"1")
        os.close(options.ready)

    async def whole() -> bool:
        queues = parse_queues(options.queue)
        settings, functions = worker_command.configure(options.app)
        return await worker_command.run_worker(
            settings, queues, functions, once=options.once, worker_id=options.worker_id, tell_ready=tell_ready
        )

    try:
        stuck = run(whole, fast=True)
    except typer.Exit as error:
        return error.exit_code
    if stuck:
        os._exit(0)  # The job of a stuck function is requeued; its thread must not keep the process alive.
    return 0


if __name__ == "__main__":
    main()
