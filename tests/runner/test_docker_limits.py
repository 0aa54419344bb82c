"""The limits of a container, probed from inside."""

from typing import Any

import pytest

from holdfast.model import Status
from tests.support.docker_engine import DockerEngine
from tests.support.in_process_workers import InProcessWorkers

pytestmark = pytest.mark.usefixtures("docker")

PROBE = r"""
say() { echo "$1=$2"; }
try() { name=$1; shift; "$@" >/dev/null 2>&1 && say $name yes || say $name no; }
first() { for file in "$@"; do [ -e $file ] && cat $file && return; done; }
say uid $(id -u)
say gid $(id -g)
say groups "$(id -G)"
for name in CapInh CapPrm CapEff CapBnd CapAmb NoNewPrivs; do
  say $name $(grep ^$name: /proc/self/status | cut -f2)
done
try write_root touch /x
try write_etc touch /etc/x
try write_volume touch /holdfast/x
try write_supervisor sh -c 'echo x > /holdfast/supervisor'
try write_tmp sh -c 'cp /bin/busybox /tmp/busybox && /tmp/busybox true'
try write_work touch $HOLDFAST_WORK_DIR/x
try kill_pid_1 sh -c 'kill -9 1; sleep 0.2; kill -0 1'
try make_device mknod /tmp/device c 1 3
try chown_file chown 0 $HOLDFAST_WORK_DIR/x
say networks "$(ls /sys/class/net | tr '\n' ' ')"
say pid_1 $(cat /proc/1/comm)
say memory $(first /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max)
say pids $(first /sys/fs/cgroup/pids/pids.max /sys/fs/cgroup/pids.max)
say cpu $(first /sys/fs/cgroup/cpu/cpu.cfs_quota_us /sys/fs/cgroup/cpu.max)
"""


async def probe(workers: InProcessWorkers, **spec: Any) -> dict[str, str]:
    job = await workers.container(PROBE, spec=spec)
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    return dict(line.split("=", 1) for line in await workers.log(job))


async def test_a_container_gets_only_what_it_needs(workers: InProcessWorkers) -> None:
    """Proves R15."""
    found = await probe(workers)
    nothing = "0000000000000000"
    assert found == {
        "uid": "65532", "gid": "65532", "groups": "65532",
        "CapInh": nothing, "CapPrm": nothing, "CapEff": nothing, "CapBnd": nothing, "CapAmb": nothing,
        "NoNewPrivs": "1",
        "write_root": "no", "write_etc": "no", "write_volume": "no", "write_supervisor": "no",
        "write_tmp": "yes", "write_work": "yes", "kill_pid_1": "yes", "make_device": "no", "chown_file": "no",
        "networks": "lo ", "pid_1": "supervisor",
        "memory": str(1 << 30), "pids": "256", "cpu": found["cpu"],
    }  # fmt: skip
    assert found["cpu"].split()[0] == "100000"


async def test_limits_are_the_jobs_or_the_settings(workers: InProcessWorkers) -> None:
    """Proves R15."""
    workers.set(allow_root_jobs=True)
    own = await probe(workers, memory="64m", cpus=0.5, pids=40, user="0", network="host")
    assert (own["memory"], own["pids"], own["cpu"].split()[0]) == (str(64 << 20), "40", "50000")
    assert (own["uid"], own["CapEff"], own["NoNewPrivs"], own["write_root"]) == ("0", "0000000000000000", "1", "no")
    assert own["networks"] != "lo "
    workers.set(docker_memory="128m", docker_cpus=0.25, docker_pids=50)
    set_ = await probe(workers)
    assert (set_["memory"], set_["pids"], set_["cpu"].split()[0]) == (str(128 << 20), "50", "25000")


async def test_out_of_memory_is_recorded_and_the_log_is_kept(workers: InProcessWorkers) -> None:
    """Also if a child of the command was killed and the command then failed, but not if the job outlived it.

    Proves R15, R20.
    """
    small: Any = {"spec": {"memory": "16m"}}
    direct = await workers.container("echo up; exec tail /dev/zero", **small)
    child = await workers.container("echo up; tail /dev/zero", **small)
    tmpfs = await workers.container("echo up; dd if=/dev/zero of=/tmp/x bs=1M count=64", **small)
    survivor = await workers.container("echo up; tail /dev/zero; echo still here", **small)
    async with workers.worker({"default": 2}):
        for job in (direct, child, tmpfs):
            ended = await workers.ended(job, Status.FAILED)
            assert ended.error is not None
            assert ended.error.code == "out_of_memory"
            assert await workers.log(job) == ["up"]
        await workers.ended(survivor, Status.SUCCEEDED)
    assert await workers.log(survivor) == ["up", "still here"]


async def test_fork_bomb_is_limited_and_can_be_stopped(workers: InProcessWorkers, docker: DockerEngine) -> None:
    """Proves R15, C4."""
    # The shell that bombs ends when it can fork no more; what it was started from stays, to be cancelled.
    bomb = "echo up; (f() { f | f & }; while :; do f; (sleep 600 &); done) 2>/dev/null & exec sleep 600"
    job = await workers.container(bomb, spec={"pids": 30, "cpus": 0.5}, stop_grace=0.2)
    other = await workers.container("echo fine")
    async with workers.worker():
        await workers.wait_for_log(job, "up")
        await workers.ended(other, Status.SUCCEEDED)
        (name,) = [name for name in docker.containers() if job.id in name]
        assert len(docker.docker("top", name).splitlines()) <= 31
        await workers.store.jobs.cancel(job.id)
        await workers.ended(job, Status.CANCELLED)
