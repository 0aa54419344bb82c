"""What `holdfast up` prints once it runs: commands to paste into another terminal."""

import ipaddress
import shlex
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from holdfast.client.http import URL
from holdfast.config import Settings

BANNER = """
  holdfast is up: {url}   (Ctrl-C ends it)

  try, in another terminal{where}:
    {commands}
"""


def banner(settings: Settings, port: int, queues: Mapping[str, int]) -> str:
    url = f"http://{_reached_at(settings.host)}:{port}"
    here = settings.data_dir.absolute() == Path("holdfast-data").absolute()
    named = {} if url == URL else {"HOLDFAST_URL": url}
    if not here:
        named["HOLDFAST_DATA_DIR"] = str(settings.data_dir.absolute())
    program = _program()
    queue = "" if "default" in queues else f" --queue {shlex.quote(next(iter(queues)))}"
    commands = [
        *(["export " + " ".join(f"{name}={shlex.quote(value)}" for name, value in named.items())] if named else []),
        f"{program} run{queue} -- sh -c 'echo hello; sleep 2; echo done'",
        f"{program} ls",
        f"{program} watch $({program} submit{queue} -- sleep 2)",
    ]
    where = ", in this folder" if here else ""
    return BANNER.format(url=url, where=where, commands="\n    ".join(commands))


def _reached_at(host: str) -> str:
    """Return the address to connect to; a server on all addresses is reached at the loopback address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"
    return host if address.version == 4 else f"[{host}]"


def _program() -> str:
    """Return how to call this installation's command: by name if it is on PATH, else by its path."""
    own = Path(sys.executable).with_name("holdfast")
    found = shutil.which("holdfast")
    if not own.exists() or (found is not None and Path(found).resolve() == own.resolve()):
        return "holdfast"
    return shlex.quote(str(own))
