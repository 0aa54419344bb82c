"""Runs a command in the sandbox that a systemd unit describes, without systemd.

`python -m tests.support.sandbox UNIT FOLDER COMMAND…`, as root; FOLDER stands for the unit's state folder. Of the unit
it applies what decides whether jobs work: the capabilities, no new privileges, a file system that is read-only but for
the named folders, and the filter of system calls. It does not become the unit's user, who need not be there.
"""

import ctypes
import ctypes.util
import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CLONE_NEWNS = 0x20000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 38, 24
ERRNO = 0x00050000
ALLOW = 0x7FFF0000
CAPABILITIES = """
    chown dac_override dac_read_search fowner fsetid kill setgid setuid setpcap linux_immutable net_bind_service
    net_broadcast net_admin net_raw ipc_lock ipc_owner sys_module sys_rawio sys_chroot sys_ptrace sys_pacct sys_admin
    sys_boot sys_nice sys_resource sys_time sys_tty_config mknod lease audit_write audit_control setfcap mac_override
    mac_admin syslog wake_alarm block_suspend audit_read perfmon bpf checkpoint_restore
"""
"""By number, as the kernel counts them."""

libc = ctypes.CDLL(None, use_errno=True)


def read_unit(path: Path) -> dict[str, list[str]]:
    """The settings of a unit by name; a list may be said in several lines."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith(("#", "[")):
            found.setdefault(name, []).append(value)
    return found


def syscalls(filters: Sequence[str]) -> set[str]:
    """The names of the system calls that `SystemCallFilter=` allows."""
    allowed: set[str] = set()
    for line in filters:
        for word in line.removeprefix("~").split():
            names = _group(word) if word.startswith("@") else {word}
            allowed = allowed - names if line.startswith("~") else allowed | names
    return allowed


def _group(name: str) -> set[str]:
    said = subprocess.run(["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, check=True)
    names: set[str] = set()
    for line in said.stdout.splitlines()[1:]:
        word = line.partition("#")[0].strip()
        names |= _group(word) if word.startswith("@") else {word} if word else set()
    return names


def check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def shut_file_system(writable: Sequence[str]) -> None:
    """Make every mount read-only, but for these folders and the API file systems, as `ProtectSystem=strict` does."""
    check(libc.unshare(CLONE_NEWNS), "unshare")
    check(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None), "private")
    for folder in writable:
        check(libc.mount(folder.encode(), folder.encode(), None, MS_BIND | MS_REC, None), folder)
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].encode().decode("unicode_escape") for line in lines]
    open_below = (*writable, "/dev", "/proc", "/sys")
    for point in points:
        if not any(point == folder or point.startswith(f"{folder}/") for folder in open_below):
            libc.mount(None, point.encode(), None, MS_REMOUNT | MS_BIND | MS_RDONLY, None)


def limit_capabilities(kept: Sequence[str]) -> None:
    wanted = {name.removeprefix("CAP_").lower() for name in kept}
    for number, name in enumerate(CAPABILITIES.split()):
        if name not in wanted:
            libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)


def filter_system_calls(allowed: set[str]) -> None:
    """Refuse all system calls but these with EPERM, by libseccomp."""
    seccomp = ctypes.CDLL(ctypes.util.find_library("seccomp"))
    seccomp.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(seccomp.seccomp_init(ctypes.c_uint32(ERRNO | errno.EPERM)))
    for name in sorted(allowed):
        number = seccomp.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:
            seccomp.seccomp_rule_add(context, ctypes.c_uint32(ALLOW), ctypes.c_int(number), ctypes.c_uint(0))
    check(seccomp.seccomp_load(context), "seccomp")


def enter(unit: dict[str, list[str]], state: str) -> None:
    """Give up what the unit takes away."""
    allowed = syscalls(unit["SystemCallFilter"])
    if unit["ProtectSystem"] == ["strict"]:
        shut_file_system([state, *" ".join(unit.get("ReadWritePaths", [])).split()])
    limit_capabilities(" ".join(unit["CapabilityBoundingSet"]).split())
    if unit["NoNewPrivileges"] == ["yes"]:
        check(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    filter_system_calls(allowed)


if __name__ == "__main__":
    enter(read_unit(Path(sys.argv[1])), sys.argv[2])
    os.execvp(sys.argv[3], sys.argv[3:])
