"""Containers in a worker: their environment, their output, and how each end is recorded."""

import asyncio
import base64
import json
import signal
import time
from typing import Any

import pytest

from holdfast.model import Cause, Job, Status, new_id
from holdfast.runner.collected_outputs import ArtifactLimits
from holdfast.runner.folder_artifacts import FolderArtifacts
from holdfast.runner.uploads import link_uploads, receive_upload
from tests.support.docker_engine import ENTRY, EXIT, DockerEngine
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.worker.test_collect import artifacts_of

pytestmark = pytest.mark.usefixtures("docker")


def name_of(docker: DockerEngine, job: Job) -> str:
    (name,) = [name for name in docker.containers() if job.id in name]
    return name


async def test_a_container_runs_and_its_output_is_kept_apart_and_in_order(workers: InProcessWorkers) -> None:
    """The last line before the exit is there, with or without a line end; nothing is left. Proves R10, R16, R24."""
    job = await workers.container("for n in 1 2 3; do echo out $n; echo err $n >&2; done; printf 'no line end'")
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert await workers.log(job) == ["out 1", "out 2", "out 3", "no line end"]
    assert await workers.log(job, "stderr") == ["err 1", "err 2", "err 3"]
    assert (ended.exit_code, ended.attempts) == (0, 1)
    assert [event.type for event in await workers.events(job)][-1] == "status"


async def test_environment_merges_image_job_and_identity(
    workers: InProcessWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proves R1."""
    monkeypatch.setenv("SECRET_OF_THE_WORKER", "x")
    env = {"A": "1", "HOLDFAST_JOB_ID": "forged"}
    job = await workers.container("env; echo WORK=$(pwd); cat request.json", env=env, inputs={"rows": 3})
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    lines = await workers.log(job)
    known = dict(line.split("=", 1) for line in lines[:-1])
    assert "SECRET_OF_THE_WORKER" not in known
    assert (known["A"], known["HOME"], known["HOLDFAST_JOB_ID"]) == ("1", "/tmp", job.id)
    assert known["OF_IMAGE"] == "yes"
    assert (known["HOLDFAST_ATTEMPT"], known["HOLDFAST_LEASE_TOKEN"]) == ("1", "1")
    assert known["HOLDFAST_WORK_DIR"] == known["WORK"] == "/holdfast/attempt/work"
    assert known["HOLDFAST_MARK"] == f"{await workers.store.installation()}/{job.id}/1"
    assert json.loads(lines[-1]) == {"rows": 3}


async def test_uploads_of_a_job_are_in_its_work_folder(workers: InProcessWorkers) -> None:
    artifacts = FolderArtifacts(workers.settings.shared)
    incoming = receive_upload(artifacts, "default", ArtifactLimits(bytes=1000))
    for name in ("a.txt", "deep/er/b.txt"):
        incoming.begin(name)
        incoming.write(name.encode())
        incoming.end()
    incoming.publish()
    job_id = new_id()
    link_uploads(artifacts, "default", job_id, [incoming.id], 1000)
    script = "cat input/a.txt; echo; cat input/deep/er/b.txt; echo x >> input/a.txt"
    await workers.container(script, id=job_id, uploads=[incoming.id])
    async with workers.worker():
        await workers.ended(job_id, Status.SUCCEEDED)
    assert await workers.log(job_id) == ["a.txt", "deep/er/b.txt"]


async def test_an_image_has_an_entrypoint_a_command_and_a_folder_of_its_own(workers: InProcessWorkers) -> None:
    async def submit(command: list[str] | None, **more: Any) -> Job:
        spec = {"image": ENTRY, **({"command": command} if command else {}), **more}
        return await workers.submit(runner="docker", spec=spec)

    own, given = await submit(None), await submit(["a", "caller"])
    inside = await workers.container(
        "pwd; id -u; id -g; touch $HOLDFAST_WORK_DIR/mine && echo mine", spec={"user": "worker"}
    )
    numbers = await workers.container("id -u; id -g", spec={"user": "77:88"})
    unknown = await workers.container("id", spec={"user": "nosuchuser"}, max_attempts=3)
    bare = await workers.submit(runner="docker", spec={"image": "holdfast-test:1"})
    async with workers.worker():
        for job in (own, given, inside, numbers):
            await workers.ended(job, Status.SUCCEEDED)
        failed = [await workers.ended(job, Status.FAILED) for job in (unknown, bare)]
    assert (await workers.log(own), await workers.log(given)) == (["from image"], ["from a caller"])
    assert await workers.log(inside) == ["/holdfast/attempt/work", "4321", "1234", "mine"]
    assert await workers.log(numbers) == ["77", "88"]
    errors = [job.error for job in failed if job.error is not None]
    assert [error.code for error in errors] == ["command_missing", "command_missing"]
    assert "no user nosuchuser in image holdfast-test:1" in errors[0].message
    assert "has no command of its own" in errors[1].message


async def test_event_lines_are_events_and_all_others_are_log_lines(workers: InProcessWorkers) -> None:
    """Proves R11, C7."""
    job = await workers.container(
        'echo \'{"event":"progress","percent":40}\'; echo plain; echo \'{"event":"usage","tokens":7}\''
    )
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert await workers.log(job) == ["plain"]
    assert (ended.progress, ended.usage) == ({"percent": 40}, {"tokens": 7})


async def test_log_is_truncated_at_its_cap_and_event_lines_still_pass(workers: InProcessWorkers) -> None:
    """Proves R10."""
    workers.set(log_max_bytes=10_000)
    job = await workers.container('seq 1 100000; echo \'{"event":"late"}\'')
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    log = await workers.log(job)
    assert log[:-1] == [str(n) for n in range(1, len(log))]
    assert "over 10000 bytes" in log[-1]
    assert len(await workers.events(job, "late")) == 1


async def test_output_that_the_engine_rotates_away_is_read_from_the_volume(
    workers: InProcessWorkers, docker: DockerEngine
) -> None:
    """More than the engine keeps, written while nobody reads, and bytes that are no text. Proves R10, R3."""
    workers.set(log_max_bytes=100_000_000)
    count = 3_000_000
    wait = "while [ ! -e go ]; do sleep 0.1; done"
    job = await workers.container(f"printf 'a\\377\\000b\\n'; {wait}; seq 1 {count}")
    async with workers.worker():
        await workers.wait_for_log(job, "a\ufffd\0b")
    (name,) = docker.containers()
    docker.docker("exec", "-u", "65532", name, "touch", "/holdfast/attempt/work/go")

    async def over() -> bool:
        return docker.docker("ps", "-q") == ""

    await eventually(over, "it has ended, unread")
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    seen, after = 0, 0
    while (page := await workers.store.events.page(job.id, after=after)).items:
        for event in page.items:
            if event.type == "log":
                for line in event.data["lines"]:
                    assert line == (str(seen) if seen else "a\ufffd\0b")
                    seen += 1
        after = page.items[-1].seq
    assert seen == count + 1


async def test_container_that_cannot_start_fails_without_a_retry(workers: InProcessWorkers) -> None:
    """The message names the command, and nothing is left. Proves R17."""
    jobs = {
        "no-such-command": await workers.container("", spec={"command": ["no-such-command"]}, max_attempts=5),
        "no-such-image:7": await workers.container("", spec={"image": "no-such-image:7"}, max_attempts=5),
        "../containers/x": await workers.container("", spec={"image": "../containers/x"}, max_attempts=5),
        "no-such-network": await workers.container("true", spec={"network": "no-such-network"}),
        "memory": await workers.container("true", spec={"memory": "1k"}),
    }
    async with workers.worker():
        ends = {name: await workers.ended(job, Status.FAILED) for name, job in jobs.items()}
    for name, ended in ends.items():
        assert ended.error is not None
        assert name in ended.error.message
        assert ended.attempts == 1
    codes = [ended.error.code for ended in ends.values() if ended.error]
    assert codes == ["command_missing", "image_missing", "image_missing", "start_failed", "start_failed"]


async def test_attempts_record_every_cause_of_an_end(workers: InProcessWorkers, docker: DockerEngine) -> None:
    """Proves R20, R8, R9, R15, R22."""
    quick: Any = {"stop_grace": 0.2}
    jobs = {
        Cause.EXIT: await workers.container("exit 3"),
        Cause.TIMED_OUT: await workers.container("echo partial; sleep 60", timeout=5, **quick),
        Cause.IDLE_TIMEOUT: await workers.container("sleep 60", idle_timeout=0.3, **quick),
        Cause.START_FAILED: await workers.container("", spec={"command": ["no-such-command"]}),
        Cause.OUT_OF_MEMORY: await workers.container("echo up; exec tail /dev/zero", spec={"memory": "16m"}),
        Cause.CANCELLED: await workers.container("echo up; sleep 60", **quick),
        Cause.INTERRUPTED: await workers.container("echo up; sleep 60", **quick),
        Cause.LOST: await workers.container("echo up; sleep 60", **quick),
    }
    by_signal = await workers.container("kill -SEGV $$")
    async with workers.worker({"default": 4}):
        for cause in (Cause.CANCELLED, Cause.INTERRUPTED, Cause.LOST):
            await workers.wait_for_log(jobs[cause], "up")
            match cause:
                case Cause.CANCELLED:
                    await workers.store.jobs.cancel(jobs[cause].id)
                case Cause.INTERRUPTED:
                    await workers.store.jobs.interrupt(jobs[cause].id)
                case Cause.LOST:
                    docker.docker("kill", name_of(docker, jobs[cause]))
        for job in (*jobs.values(), by_signal):
            await workers.ended(job)
    ends = {}
    for cause, job in jobs.items():
        (attempt,) = await workers.store.attempts.list(job.id)
        assert attempt.cause is cause
        ends[cause] = (attempt.exit_code, (await workers.get(job)).status, attempt.error and attempt.error.code)
    assert ends == {
        Cause.EXIT: (3, Status.FAILED, "exit_nonzero"),
        Cause.TIMED_OUT: (124, Status.TIMED_OUT, "timed_out"),
        Cause.IDLE_TIMEOUT: (124, Status.TIMED_OUT, "idle_timeout"),
        Cause.START_FAILED: (None, Status.FAILED, "command_missing"),
        Cause.OUT_OF_MEMORY: (None, Status.FAILED, "out_of_memory"),
        Cause.CANCELLED: (None, Status.CANCELLED, "cancelled"),
        Cause.INTERRUPTED: (None, Status.PAUSED, "interrupted"),
        Cause.LOST: (None, Status.FAILED, "lost"),
    }
    (attempt,) = await workers.store.attempts.list(by_signal.id)
    assert (attempt.cause, attempt.signal, attempt.exit_code) == (Cause.EXIT, signal.SIGSEGV, None)
    assert await workers.log(jobs[Cause.TIMED_OUT]) == ["partial"]


async def test_exit_record_that_contradicts_the_engine_is_lost(workers: InProcessWorkers, docker: DockerEngine) -> None:
    """The child writes an `exit` of its own that says 0, and the engine says killed. Proves R22."""
    forge = """sed -e 's/"event":"x"//' > ../exit; echo forged; sleep 60"""
    job = await workers.container(f"echo '{json.dumps(EXIT)}' | {forge}")
    async with workers.worker():
        await workers.wait_for_log(job, "forged")
        docker.docker("kill", name_of(docker, job))
        ended = await workers.ended(job, Status.FAILED)
    assert ended.error is not None
    assert ended.error.code == "lost"
    assert "its exit record says status 0, its engine says 137" in ended.error.message


async def test_removed_container_is_lost(workers: InProcessWorkers, docker: DockerEngine) -> None:
    """Proves R22."""
    job = await workers.container("echo up; sleep 60")
    async with workers.worker():
        await workers.wait_for_log(job, "up")
        docker.docker("rm", "-fv", name_of(docker, job))
        ended = await workers.ended(job, Status.FAILED)
    assert ended.error is not None
    assert ended.error.code == "lost"


async def test_a_job_that_fails_is_run_again_in_a_container_of_its_own(workers: InProcessWorkers) -> None:
    """Attempt 2 knows nothing of attempt 1. Proves R1, L13."""
    script = "echo attempt $HOLDFAST_ATTEMPT; ls; touch was-here; [ $HOLDFAST_ATTEMPT = 2 ]"
    job = await workers.container(script, max_attempts=3, retry={"base": 0.01, "cap": 0.01})
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    fresh = ["output", "request.json"]
    assert await workers.log(job) == ["attempt 1", *fresh, "attempt 2", *fresh]
    assert ended.attempts == 2


async def test_stop_sequence_records_each_step(workers: InProcessWorkers, docker: DockerEngine) -> None:
    """A child that ignores TERM is killed, and what left its group too. Proves C4, C5."""
    script = "trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 600' & echo up; wait; sleep 600"
    job = await workers.container(script, stop_grace=0.3)
    async with workers.worker():
        await workers.wait_for_log(job, "up")
        await workers.store.jobs.cancel(job.id, by="someone")
        await workers.ended(job, Status.CANCELLED)
    phases = [event.data["cancel"] for event in await workers.events(job, "cancel")]
    assert phases == ["requested", "signalled", "killed", "dead"]
    assert docker.containers() == []


async def test_over_its_budget_a_container_is_stopped_and_not_retried(workers: InProcessWorkers) -> None:
    """Proves C6, C7."""
    script = 'while :; do echo \'{"event":"usage","tokens":30}\'; sleep 0.05; done'
    job = await workers.container(script, budget={"tokens": 100}, max_attempts=4, stop_grace=1)
    async with workers.worker():
        ended = await workers.ended(job, Status.FAILED)
    assert ended.error is not None
    assert (ended.error.code, ended.attempts) == ("budget_exceeded", 1)


async def test_container_without_a_heartbeat_stops_after_stop_after(
    workers: InProcessWorkers, docker: DockerEngine
) -> None:
    """Proves R21: beats move the deadline; with no worker the child is gone before the next attempt starts."""
    script = "echo attempt $HOLDFAST_ATTEMPT; [ $HOLDFAST_ATTEMPT = 2 ] || sleep 600"

    async def stopped() -> bool:
        return await asyncio.to_thread(docker.docker, "ps", "-q") == ""

    job = await workers.container(
        script, stop_after=8, max_attempts=2, stop_grace=0.2, retry={"base": 0.01, "cap": 0.01}
    )
    async with workers.worker():
        await workers.wait_for_log(job, "attempt 1")
        until = time.monotonic() + 9.5
        while time.monotonic() < until:
            assert not await stopped(), "beats move the deadline"

    await eventually(stopped, "it stops by itself")
    assert (await workers.get(job)).status is Status.RUNNING
    async with workers.worker():
        await workers.ended(job, Status.SUCCEEDED)
    assert await workers.log(job) == ["attempt 1", "attempt 2"]
    first, _ = await workers.store.attempts.list(job.id)
    assert first.cause is Cause.LOST


async def test_files_of_a_container_become_its_result_and_artifacts(workers: InProcessWorkers) -> None:
    """Of each attempt its own, and nothing where nothing was left. Proves R13, R14."""
    script = "mkdir -p output/a; echo $HOLDFAST_ATTEMPT > output/a/n; touch output/only-$HOLDFAST_ATTEMPT; "
    twice = await workers.container(
        script + "[ $HOLDFAST_ATTEMPT = 2 ]", max_attempts=2, retry={"base": 0.01, "cap": 0.01}
    )
    good = await workers.container("""echo '{"version":1,"result":{"rows":3}}' > result.json""")
    contrary = await workers.container(
        """echo '{"version":1,"status":"failed","error":{"message":"no rows"}}' > result.json"""
    )
    nothing = await workers.container("true")
    removed = await workers.container("rm -r output")
    async with workers.worker({"default": 3}):
        for job in (twice, good, nothing, removed):
            await workers.ended(job, Status.SUCCEEDED)
        failed = await workers.ended(contrary, Status.FAILED)
    assert await artifacts_of(workers, twice) == {"a/n": b"2\n", "only-2": b""}
    assert (await workers.get(good)).result == {"rows": 3}
    assert failed.error is not None
    assert failed.error.message == "no rows"
    assert [await artifacts_of(workers, job) for job in (good, nothing, removed)] == [{}] * 3


async def test_container_outputs_that_break_the_contract_are_not_collected(workers: InProcessWorkers) -> None:
    """Proves R13, R14."""
    workers.set(artifact_max_bytes=100_000)
    bad = {
        "size": "head -c 200000 /dev/zero > output/x",
        "no folder": "rmdir output; ln -s /etc output",
        "result link": "ln -s /etc/passwd result.json",
        "result fifo": "mkfifo result.json",
        "result folder": "mkdir result.json",
    }
    jobs = {name: await workers.container(script) for name, script in bad.items()}
    async with workers.worker({"default": 3}):
        for name, job in jobs.items():
            ended = await workers.ended(job, Status.FAILED)
            assert ended.error is not None, name
            assert ended.error.code == "contract_violation", name
            assert await artifacts_of(workers, job) == {}, name


async def test_secrets_of_a_container_are_given_and_masked_also_by_an_adopter(
    workers: InProcessWorkers, docker: DockerEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's description of the container does not show them. Its log does, as docs/docker.md says.

    Proves R19.
    """
    monkeypatch.setenv("HOLDFAST_SECRET_TOKEN", "open-sesame-42")
    job = await workers.container(
        "echo a $TOKEN; while [ ! -e go ]; do sleep 0.1; done; echo b $TOKEN", secrets=("TOKEN",)
    )
    async with workers.worker():
        await workers.wait_for_log(job, "a ***")
        name = name_of(docker, job)
        assert "open-sesame" not in docker.docker("inspect", name)
        logged = b"".join(base64.b64decode(line) for line in docker.docker("logs", name).splitlines())
        assert b"a open-sesame-42" in logged
    async with workers.worker():
        docker.docker("exec", "-u", "65532", name, "touch", "/holdfast/attempt/work/go")
        await workers.ended(job, Status.SUCCEEDED)
    assert await workers.log(job) == ["a ***", "b ***"]

    async def removed() -> bool:
        return name not in docker.containers()

    await eventually(removed)
