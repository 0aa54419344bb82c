"""What a hostile job runs: it tries everything against its neighbours, and reports what it got. Not imported by tests.

It is sent to the job as its standard input, and needs nothing but Python's standard library. `TARGETS` in its
environment is what an attacker may know: pids, paths, keys. Its result maps each attempt to "refused: …" or "GOT: …".
"""

# mypy: ignore-errors

import ctypes
import errno
import json
import os
import signal
import socket
import stat

TARGETS = json.loads(os.environ["TARGETS"])
SECRET = TARGETS["secret"].encode()
libc = ctypes.CDLL(None, use_errno=True)
libc.shmat.restype = ctypes.c_void_p
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
found = {}


class Refused(Exception):
    pass


def attempt(name, work, *arguments):
    try:
        found[name] = f"GOT: {work(*arguments)!r}"[:120]
    except OSError as error:
        found[name] = f"refused: {errno.errorcode.get(error.errno, error.errno)}"
    except Refused as error:
        found[name] = f"refused: {error}"


def call(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), "")
    return result


def read(path):
    with open(path, "rb", 0) as file:
        return len(file.read(65536))


def write(path):
    """Open a file for writing, and change nothing: the victim goes on, and is looked at afterwards."""
    there = os.path.lexists(path)
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600))
    if not there:
        os.unlink(path)
    return path


def read_memory(pid, address):
    with open(f"/proc/{pid}/mem", "rb", 0) as file:
        file.seek(address)
        return file.read(len(SECRET))


class Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def read_over(pid, address):
    buffer = ctypes.create_string_buffer(len(SECRET))
    mine, theirs = Vector(ctypes.addressof(buffer), len(SECRET)), Vector(address, len(SECRET))
    call(libc.process_vm_readv(pid, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0))
    return buffer.raw


def trace(pid):
    seize, detach = 0x4206, 17
    call(libc.ptrace(seize, pid, None, None))
    libc.ptrace(detach, pid, None, None)
    return "seized"


def attach_shared_memory(number):
    address = libc.shmat(number, None, 0o10000)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "")
    return ctypes.string_at(address, len(SECRET))


def connect(name):
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(5)
        one.connect("\0" + name)
        return name


def rights():
    """Capabilities, supplementary groups, or the possibility to gain any."""
    with open("/proc/self/status") as file:
        status = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
    more = {name: status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb") if int(status[name], 16)}
    if status["NoNewPrivs"].strip() != "1":
        more["NoNewPrivs"] = status["NoNewPrivs"]
    if set(os.getgroups()) - {os.getgid()}:
        more["Groups"] = os.getgroups()
    return some(more)


def descriptors():
    listing = os.open("/proc/self/fd", os.O_RDONLY)
    more = [name for name in os.listdir(listing) if int(name) > 2 and int(name) != listing]
    more = {name: os.readlink(f"/proc/self/fd/{name}") for name in more}
    os.close(listing)
    return some(more)


def environment():
    return some([name for name in os.environ if name in TARGETS["worker_environment"]])


def some(found):
    if not found:
        raise Refused("none")
    return found


def signal_by_descriptor(pid):
    fd = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(fd, 0)
    finally:
        os.close(fd)


def mount():
    return call(libc.mount(b"none", b"/mnt", b"tmpfs", 0, None))


def keep_mode(path):
    os.chmod(path, os.stat(path).st_mode & 0o777)


def link_out(path):
    os.link(path, "output/hard-" + os.path.basename(path))
    return path


def rename(path):
    os.rename(path, path + ".gone")
    os.rename(path + ".gone", path)
    return path


def become(uid):
    os.setresuid(uid, uid, uid)
    return uid


for who, pid in TARGETS["pids"].items():
    for name in ("environ", "mem", "maps", "auxv", "io", "cmdline"):
        attempt(f"{who} {name}", read, f"/proc/{pid}/{name}")
    for name in ("fd", "root", "cwd", "map_files"):
        attempt(f"{who} {name}/", os.listdir, f"/proc/{pid}/{name}")
    attempt(f"{who} exe", os.readlink, f"/proc/{pid}/exe")
    attempt(f"{who} ptrace", trace, pid)
    attempt(f"{who} signal", os.kill, pid, 0)
    attempt(f"{who} pidfd signal", signal_by_descriptor, pid)
    attempt(f"{who} priority", os.setpriority, os.PRIO_PROCESS, pid, 19)
    attempt(f"{who} affinity", os.sched_setaffinity, pid, {0})
    attempt(f"{who} oom score", write, f"/proc/{pid}/oom_score_adj")
attempt("victim memory by mem", read_memory, TARGETS["pids"]["victim"], TARGETS["address"])
attempt("victim memory by process_vm_readv", read_over, TARGETS["pids"]["victim"], TARGETS["address"])
attempt("victim shared memory, SysV", attach_shared_memory, TARGETS["segment"])
for name, path in TARGETS["read"].items():
    attempt(f"read {name}", read, path)
for name, path in TARGETS["list"].items():
    attempt(f"list {name}", os.listdir, path)
for name, path in TARGETS["write"].items():
    attempt(f"write {name}", write, path)
for name, path in TARGETS["link"].items():
    attempt(f"hard link {name}", link_out, path)
for name, path in TARGETS["replace"].items():
    attempt(f"rename {name}", rename, path)
    attempt(f"mode {name}", keep_mode, path)
for name in TARGETS["abstract"]:
    attempt(f"connect @{name}", connect, name)
attempt("uid 0", become, 0)
attempt("uid of victim", become, TARGETS["victim_uid"])
attempt("rights", rights)
attempt("descriptors", descriptors)
attempt("environment of the worker", environment)
attempt("device", os.mknod, "device", 0o666 | stat.S_IFBLK, os.makedev(7, 0))
attempt("chroot", os.chroot, "/")
attempt("mount", mount)
attempt("higher priority", os.setpriority, os.PRIO_PROCESS, 0, -5)
attempt("host name", socket.sethostname, "hostile")

with open("result.json", "w") as file:
    json.dump({"version": 1, "result": {"uid": os.getuid(), "found": found}}, file)
