"""The versions of what is measured, asked of the installed packages themselves."""

import asyncio
import json
import os
import platform
import subprocess
from pathlib import Path

from bench.peers import environments
from bench.peers.deployment import command
from bench.peers.keepers import Keepers
from bench.peers.peer import Peer, Runtime

ASK = (
    "import json, sys; from importlib.metadata import version; print(json.dumps({n: version(n) for n in sys.argv[1:]}))"
)


def of(peer: Peer) -> dict[str, str]:
    if peer.runtime is Runtime.NODE:
        folder, _ = environments.node()
        return {name: _node_version(folder, name) for name in peer.packages}
    python = command(peer, "client", "")[0]
    said = subprocess.run([python, "-c", ASK, *peer.packages], check=True, capture_output=True, text=True)
    versions: dict[str, str] = json.loads(said.stdout)
    number = subprocess.run([python, "-V"], check=True, capture_output=True, text=True).stdout.split()[1]
    return {**versions, "Python": number}


def _node_version(folder: Path, name: str) -> str:
    package = json.loads((folder / "node_modules" / name / "package.json").read_text())
    return str(package["version"])


async def machine(keepers: Keepers) -> dict[str, str]:
    """What the figures depend on."""
    settings = ("server_version", "fsync", "synchronous_commit", "shared_buffers")
    shown = {f"Postgres {name}": await keepers.postgres.shown(name) for name in settings}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpu = await asyncio.to_thread(_cpu)
    return {
        "processors": f"{os.cpu_count()} × {cpu}",
        "memory": f"{memory:.0f} GB",
        "Linux": platform.release(),
        **shown,
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
