"""`holdfast run --here`: run a command in the current folder, by a worker of this host that has this user.

Nothing on the server knows about it: the job is a command that changes into the folder. So it can do no more than any
other command of the same caller. A shell checks, right before the command starts, that this is the same host, the same
folder and the same user.
"""

import dataclasses
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.job_description import JobDescription
from holdfast.cli.session import REFUSED, USAGE, fail

if TYPE_CHECKING:
    from holdfast.client.http import AsyncClient

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
QUEUE = "default"
GUARD = """
refuse() { echo "holdfast: --here: $1" >&2; exit 126; }
[ "$(cat /proc/sys/kernel/random/boot_id)" = "$1" ] || refuse "the worker $(hostname) is on another host"
[ "$(id -u)" = "$2" ] || refuse "the worker runs jobs as uid $(id -u), not as you (uid $2); start one as yourself"
[ "$(stat -c %d:%i -- "$4")" = "$3" ] || refuse "the worker does not see $4, or sees another folder there"
cd -- "$4" || exit 126
shift 4
exec "$@"
"""


def in_this_folder(wanted: JobDescription) -> JobDescription:
    """Return a job whose command runs in the current folder, or not at all."""
    spec = wanted.job.get("spec", {})
    if wanted.job.get("runner") != "process" or not spec.get("command"):
        fail(
            "--here is for a command that runs as a process: give one after --, without --image, --tool or --file",
            USAGE,
        )
    folder = os.getcwd()
    at = os.stat(folder)
    facts = (BOOT_ID.read_text().strip(), str(os.getuid()), f"{at.st_dev}:{at.st_ino}", folder)
    command = ["sh", "-c", GUARD, "holdfast", *facts, *spec["command"]]
    return dataclasses.replace(wanted, job={**wanted.job, "spec": {**spec, "command": command}})


async def refuse_elsewhere(client: "AsyncClient", wanted: JobDescription) -> None:
    """Refuse what could not work: a token that is not an admin's, and workers of the queue on other hosts."""
    from holdfast.client.http import Refused

    try:
        await client.request("GET", "/v1/audit", query={"limit": 1})
    except Refused as error:
        if error.status == 403:
            fail("--here needs an admin's token", REFUSED)
        raise
    queue, host = wanted.job.get("queue") or QUEUE, socket.gethostname()
    hosts = {
        one.host for one in await client.workers() if one.live and queue in one.queues and "process" in one.capabilities
    }
    if host not in hosts:
        fail(f"--here: no live worker of queue {queue} runs commands on this host, {host}", REFUSED)
    if others := sorted(hosts - {host}):
        fail(
            f"--here: queue {queue} has workers on other hosts, too: {', '.join(others)}; "
            "give --queue a queue that only a worker of this host serves",
            REFUSED,
        )
