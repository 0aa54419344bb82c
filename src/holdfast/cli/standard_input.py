"""The standard input of `holdfast run`, passed on to the command.

Text becomes `spec.stdin`. What is too long for that, or not text, is uploaded as a file of the work folder, and a shell
opens it for the command.
"""

import dataclasses
import os
import stat
import sys
import threading
from pathlib import Path

from holdfast.cli.job_description import JobDescription
from holdfast.cli.terminal import say

MOST_TEXT = 256 * 1024
NOTICE_SECONDS = 2.0
NOTICE = "holdfast: reading the standard input until its end; --no-stdin runs the command without it"
FILE = "stdin"
OPENED = ("sh", "-c", f'exec "$@" < input/{FILE}', "sh")


def read_standard_input() -> bytes:
    """Return all of the standard input if it is a pipe, a socket or a file; nothing of a terminal or a device."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return b""
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or stat.S_ISREG(mode)):
        return b""
    notice = threading.Timer(NOTICE_SECONDS, lambda: say(NOTICE, err=True))
    notice.daemon = True
    notice.start()
    try:
        return sys.stdin.buffer.read()
    finally:
        notice.cancel()


def with_standard_input(wanted: JobDescription, content: bytes, folder: Path) -> JobDescription:
    """Give a command its standard input; `folder` is for a file to upload, until the job is submitted."""
    if not content:
        return wanted
    spec = wanted.job["spec"]
    if (text := _text(content)) is not None:
        return dataclasses.replace(wanted, job={**wanted.job, "spec": {**spec, "stdin": text}})
    file = folder / FILE
    file.write_bytes(content)
    opened = {**spec, "command": [*OPENED, *spec["command"]]}
    return dataclasses.replace(wanted, job={**wanted.job, "spec": opened}, files=(*wanted.files, file))


def _text(content: bytes) -> str | None:
    if len(content) > MOST_TEXT or b"\0" in content:
        return None
    try:
        return content.decode()
    except UnicodeDecodeError:
        return None
