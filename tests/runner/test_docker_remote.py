"""A Docker engine on the network that accepts only clients with a known certificate."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import ConfigError
from holdfast.model import Status
from holdfast.runner.folder_artifacts import FolderArtifacts
from tests.support.docker_engine import DockerEngine, daemon, skip_without
from tests.support.in_process_workers import InProcessWorkers, eventually
from tests.support.ports import free_port


def make_certificates(folder: Path) -> None:
    """An authority, and a certificate by it for the engine and for its client, under the names that Docker uses."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    usage = "keyUsage=critical,keyCertSign"
    openssl(*new, "-x509", "-days", "2", "-subj", "/CN=ca", "-addext", usage, "-keyout", "ca-key.pem", "-out", "ca.pem")
    for name, extension in (("server", "subjectAltName=IP:127.0.0.1"), ("", "extendedKeyUsage=clientAuth")):
        key, request, certificate = (f"{name}{'-' if name else ''}{what}" for what in ("key.pem", "csr", "cert.pem"))
        (folder / "extension").write_text(extension)
        openssl(*new, "-subj", f"/CN={name or 'client'}", "-keyout", key, "-out", request)
        openssl(
            "x509", "-req", "-in", request, "-CA", "ca.pem", "-CAkey", "ca-key.pem", "-days", "2",
            "-extfile", "extension", "-out", certificate,
        )  # fmt: skip


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture(scope="module")
def remote(certificates: Path) -> Iterator[tuple[DockerEngine, str]]:
    """An engine and its address on the network."""
    skip_without()
    address = f"tcp://127.0.0.1:{free_port()}"
    files = [f"--tls{what}={certificates}/{file}" for what, file in (
        ("cacert", "ca.pem"), ("cert", "server-cert.pem"), ("key", "server-key.pem")
    )]  # fmt: skip
    with daemon(live_restore=False, options=[f"--host={address}", "--tlsverify", *files]) as engine:
        yield engine, address


@pytest.mark.parametrize("kind", ["sqlite"])
async def test_an_engine_on_the_network_runs_jobs_for_those_it_knows(
    workers: InProcessWorkers,
    remote: tuple[DockerEngine, str],
    certificates: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Files go in and out by archive: nothing is shared with its host. Proves R4, R5, R13, R14."""
    engine, address = remote
    workers.set(docker_host=address)
    job = await workers.container("cat request.json; echo made > output/made", inputs={"a": 1})
    async with workers.worker():  # Without certificates nobody is let in, and nothing is lost.

        async def refused() -> bool:
            reasons = (await workers.store.explain.job(job.id)).reasons
            return any(f"the Docker engine at {address} refused the request" in reason.message for reason in reasons)

        await eventually(refused, "the worker says that it is not let in")
        assert (await workers.get(job)).status is Status.QUEUED
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"the certificates in .* cannot be read"):
        async with workers.worker():
            pass
    monkeypatch.setenv("DOCKER_CERT_PATH", str(certificates))
    async with workers.worker():
        ended = await workers.ended(job, Status.SUCCEEDED)
    assert (ended.attempts, await workers.log(job)) == (1, ['{"a":1}'])
    (attempt,) = await workers.store.attempts.list(job.id)
    assert [
        file.path for file in FolderArtifacts(workers.settings.shared).list(job.id, attempt.attempt, attempt.token)
    ] == ["made"]
    monkeypatch.delenv("DOCKER_TLS_VERIFY")  # Docker's own command line would use it on a Unix socket, too.
    assert (engine.containers(), engine.volumes()) == ([], [])
