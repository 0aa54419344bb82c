"""An image with Postgres in it, made of what this host has installed: its programs, what they link to, and busybox."""

import io
import re
import subprocess
import tarfile
from pathlib import Path

from tests.support.cluster import binaries
from tests.support.docker_engine import TOOLS

NAME = "holdfast-postgres:1"
USER = 65532
PROGRAMS = ("postgres", "initdb", "psql", "pg_controldata")
FILES = ("/usr/lib/locale/C.utf8", "/usr/share/zoneinfo/UTC", "/usr/share/zoneinfo/Etc/UTC", "/usr/share/zoneinfo/GMT")
MODULES = ("plpgsql.so", "dict_snowball.so")
PASSWD = f"root:x:0:0::/:/bin/sh\nnobody:x:{USER}:{USER}::/tmp:/bin/sh\n"


def libraries(program: Path) -> set[str]:
    """What a program links to, by the paths where its loader looks."""
    said = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"(/\S+) \(0x", said))


def image() -> bytes:
    """The root folder of the image, as a tar."""
    bin_folder = binaries()
    version = bin_folder.parent.name
    modules = [bin_folder.parent / "lib" / name for name in MODULES]
    programs = [bin_folder / name for name in PROGRAMS]
    linked = set().union(*(libraries(path) for path in [*programs, *modules]))
    names = subprocess.run([TOOLS, "--list"], capture_output=True, text=True, check=True).stdout.split()
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", dereference=False) as tar:
        for folder in ("bin", "etc", "tmp", "proc", "sys", "dev", "usr", "usr/bin"):
            _folder(tar, folder)
        tar.add(TOOLS, "bin/busybox")
        for name in sorted({*names} - {"busybox"}):
            _link(tar, f"bin/{name}", "busybox")
        for path in [*programs, *modules, *map(Path, sorted(linked))]:
            _copy(tar, path)
        _link(tar, "usr/bin/psql", str(bin_folder / "psql"))
        for path in [Path("/usr/share/postgresql") / version, *map(Path, FILES)]:
            if path.exists():
                tar.add(path, str(path).lstrip("/"))
        entry = tarfile.TarInfo("etc/passwd")
        entry.size, entry.mode = len(PASSWD), 0o644
        tar.addfile(entry, io.BytesIO(PASSWD.encode()))
    return whole.getvalue()


def _folder(tar: tarfile.TarFile, name: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, 0o755
    tar.addfile(entry)


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    tar.addfile(entry)


def _copy(tar: tarfile.TarFile, path: Path) -> None:
    """Put a file where it is here; what is a link, as the file that it leads to."""
    data = path.resolve().read_bytes()
    entry = tarfile.TarInfo(str(path).lstrip("/"))
    entry.size, entry.mode = len(data), 0o755
    tar.addfile(entry, io.BytesIO(data))
