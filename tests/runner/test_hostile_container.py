"""A hostile container beside a victim's, on one engine: what it can see, reach and change of others."""

import asyncio

import pytest

from holdfast.model import Status
from tests.support.docker_engine import DockerEngine
from tests.support.in_process_workers import InProcessWorkers, eventually

SECRET = "correct-horse-battery-staple"
VICTIM = """
echo $SECRET > /tmp/secret; echo $SECRET > $HOLDFAST_WORK_DIR/secret
grep -rqs 'correct-hors[e]' /tmp /holdfast && echo up
while [ ! -e $HOLDFAST_WORK_DIR/never ]; do sleep 0.2; done
"""
ATTACK = r"""
say() { echo "$1=$2"; }
try() { name=$1; shift; "$@" >/dev/null 2>&1 && say "$name" yes || say "$name" no; }
say processes "$(ls /proc | grep -c '^[0-9]')"
try finds_secret sh -c "grep -rqs correct-hors[e] /tmp /holdfast /var /home /root /run /proc/[0-9]*/environ /dev/shm"
try engine_socket sh -c 'ls /var/run/docker.sock /run/docker.sock'
try host_disk sh -c 'ls /dev/sd* /dev/vd* /dev/nvme* /dev/mem /dev/kmsg'
try write_sysrq sh -c 'echo b > /proc/sysrq-trigger'
try write_sysctl sh -c 'echo 1 > /proc/sys/kernel/panic'
try write_core_pattern sh -c 'echo "|/tmp/x" > /proc/sys/kernel/core_pattern'
try write_cgroup sh -c 'echo max > /sys/fs/cgroup/memory.max || echo max > /sys/fs/cgroup/memory/memory.limit_in_bytes'
try make_cgroup mkdir /sys/fs/cgroup/x
try mount mount -t tmpfs none /tmp
try mount_proc mount -t proc proc /proc
try chroot chroot / true
try unshare unshare -m true
try device mknod /tmp/d b 8 0
try host_name hostname hostile
try become_root su -c true
try setuid sh -c 'cp /bin/busybox /tmp/su && chmod 4755 /tmp/su && [ $(/tmp/su id -u) = 0 ]'
try raw_network ping -c 1 -W 1 127.0.0.1
try loopback_of_host sh -c 'for port in 7070 5432 2375; do nc -z -w 1 127.0.0.1 $port && exit 0; done; exit 1'
try other_volumes sh -c 'ls /var/lib/docker'
try forge_exit sh -c 'echo {} > /holdfast/exit'
try forge_started sh -c 'echo {} > /holdfast/started'
try write_command sh -c 'echo x > /holdfast/cmd/x'
ln -s /etc/passwd $HOLDFAST_WORK_DIR/output/link
ln -s ../../../../etc $HOLDFAST_WORK_DIR/output/way-out
mkfifo $HOLDFAST_WORK_DIR/output/fifo
echo own > $HOLDFAST_WORK_DIR/output/own
chmod 4777 $HOLDFAST_WORK_DIR/output/own
(setsid sh -c 'trap "" TERM INT HUP; while :; do sleep 1; done' >/dev/null 2>&1 &)
"""
CANNOT = (
    "finds_secret", "engine_socket", "host_disk", "write_sysrq", "write_sysctl", "write_core_pattern", "write_cgroup",
    "make_cgroup", "mount", "mount_proc", "chroot", "unshare", "device", "host_name", "become_root", "setuid",
    "raw_network", "loopback_of_host", "other_volumes",
)  # fmt: skip


@pytest.mark.usefixtures("docker")
async def test_hostile_container_reaches_nothing_of_others(workers: InProcessWorkers) -> None:
    """Neither another container, nor the engine, nor the host; and nothing of it is left running."""
    victim = await workers.container(VICTIM, env={"SECRET": SECRET})
    async with workers.worker():
        await workers.wait_for_log(victim, "up")
        attacker = await workers.container(ATTACK)
        ended = await workers.ended(attacker, Status.SUCCEEDED)
        found = dict(line.split("=", 1) for line in await workers.log(attacker))
        assert {name: found[name] for name in CANNOT} == dict.fromkeys(CANNOT, "no")
        assert int(found["processes"]) < 15
        skipped = [
            one["path"] for event in await workers.events(attacker, "artifacts") for one in event.data["skipped"]
        ]
        assert sorted(skipped) == ["output/fifo", "output/link", "output/way-out"]
        assert ended.exit_code == 0
        assert (await workers.get(victim)).status is Status.RUNNING
        await workers.store.jobs.cancel(victim.id)
        await workers.ended(victim, Status.CANCELLED)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param("kill -9 1; kill -9 -1; sleep 1; exit 3", id="kills its supervisor"),
        pytest.param("echo '{\"version\":1}' > /holdfast/exit; sleep 1; exit 3", id="forges its end"),
        pytest.param("while :; do sh -c 'sleep 600' & done 2>/dev/null", id="fork bomb"),
        pytest.param("x=x; while :; do x=$x$x$x$x; done", id="eats memory"),
    ],
)
async def test_container_harms_itself_alone(workers: InProcessWorkers, docker: DockerEngine, script: str) -> None:
    """Attacks on its own supervisor do not make it succeed, and other jobs continue."""
    workers.set(docker_pids=64, docker_memory="64m")
    async with workers.worker():
        job = await workers.container(script, timeout=15, on_lost="fail")
        other = await workers.container("echo fine")
        await workers.ended(other, Status.SUCCEEDED)
        ended = await workers.ended(job)
        assert ended.status in (Status.FAILED, Status.TIMED_OUT), ended.error

        async def gone() -> bool:
            return await asyncio.to_thread(docker.containers) == []

        await eventually(gone, "the container is removed")
