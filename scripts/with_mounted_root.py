"""Run a command where / is a mount point: `python -m scripts.with_mounted_root COMMAND…`.

Docker's engine needs that, to import an image and to run something in a container. In a plain chroot / is none: there
the command gets a mount namespace of its own, whose root is the chroot. Everywhere else it runs as it is.
"""

import ctypes
import os
import platform
import sys
from pathlib import Path

NEW_NAMESPACE = 0x00020000
BIND, RECURSIVE, PRIVATE, DETACH = 4096, 16384, 1 << 18, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
"""glibc has no function for it."""


def is_mounted() -> bool:
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return any(line.split()[4] == "/" for line in lines)


def mount_root() -> None:
    """Make the current root the root of a new mount namespace. Nothing of it is seen outside, or outlives it."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments) != 0:
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    here, root = Path.cwd(), os.open("/", os.O_RDONLY | os.O_DIRECTORY)
    call("unshare", NEW_NAMESPACE)
    call("setns", os.open("/proc/self/ns/mnt", os.O_RDONLY), 0)  # From its root the chroot has a path.
    call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)
    os.fchdir(root)
    path = os.getcwd()
    call("mount", os.fsencode(path), os.fsencode(path), None, BIND | RECURSIVE, None)
    os.chdir(path)
    call("syscall", PIVOT_ROOT[platform.machine()], b".", b".")
    call("umount2", b".", DETACH)
    os.close(root)
    os.chdir(here)


if __name__ == "__main__":
    if os.geteuid() == 0 and not is_mounted():
        mount_root()
    os.execvp(sys.argv[1], sys.argv[1:])
