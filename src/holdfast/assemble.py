"""Puts a store and a worker together: settings in, a worker out. `assemble_service` does it for the service."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from importlib.util import find_spec

from holdfast import registry
from holdfast.config import Settings
from holdfast.descriptors import RunnerDescriptor
from holdfast.duties import store_reserve
from holdfast.duties.job_files import Containers, JobFiles
from holdfast.errors import ConfigError, HoldfastError, StoreError
from holdfast.permissions import PASSABLE, tighten
from holdfast.runner.artifacts import ArtifactStore, MakeArtifacts
from holdfast.runner.base import Runner
from holdfast.runner.disk import SHARED, disks_of
from holdfast.runner.docker.build import limits_of
from holdfast.runner.docker.job_containers import JobContainers
from holdfast.runner.folder_artifacts import FolderArtifacts
from holdfast.runner.function import FunctionRegistry
from holdfast.runner.job_files import JobFolders
from holdfast.runner.process import ProcessRunner
from holdfast.runner.runner_host import BuildRunner, RunnerHost
from holdfast.runner.shared_folder import SharedFolder, open_shared_folder
from holdfast.runner.state_folder import StateFolder
from holdfast.store import Store
from holdfast.store.outage import retry_while_starting
from holdfast.store.sqlite import SqliteDatabase
from holdfast.store.store import open_store
from holdfast.worker.execution_services import StepHook
from holdfast.worker.heartbeat import HeartbeatStore
from holdfast.worker.worker import Worker

log = logging.getLogger(__name__)

ANSWER_SHARE = 3
"""A worker's operation gives up after this fraction of the lease time: a connection may be half open."""


def folder_artifacts(settings: Settings, shared: SharedFolder) -> ArtifactStore:
    """Return the artifact store in the shared folder, which every installation has unless another one is given."""
    shortage = partial(disks_of(settings, state=False).shortage, SHARED)
    return FolderArtifacts(shared.path, check=shared.check, shortage=shortage)


async def store_of(
    settings: Settings,
    *,
    connections: int = 4,
    listen: bool = True,
    artifacts: MakeArtifacts = folder_artifacts,
) -> Store:
    """Open a store whose shared folder is verified, and which removes the files of deleted jobs."""
    store = await connected(settings, connections=connections, listen=listen)
    try:
        await attach_job_files(store, settings, artifacts=artifacts)
        with suppress(StoreError):  # The duty tries again.
            await store_reserve.run_once(store, disks_of(settings, state=False))
    except BaseException:
        await store.close()
        raise
    return store


async def attach_job_files(
    store: Store,
    settings: Settings,
    *,
    artifacts: MakeArtifacts = folder_artifacts,
    at: Callable[[str], None] | None = None,
) -> None:
    """Verify the shared folder, and let the store remove the files of deleted jobs. `at` is for tests."""
    with suppress(FileNotFoundError):
        tighten(settings.data_dir, PASSABLE)
    installation = await retry_while_starting(store.installation)
    shared = await retry_while_starting(lambda: open_shared_folder(settings.shared, installation, store.shared_folder))
    folders = JobFolders(settings.state, installation)
    containers = containers_of(settings, installation)
    # Twice the lease, as a worker that lost its lease may learn of it late.
    keep_marker_for = 2 * settings.lease_ttl
    stored = artifacts(settings, shared)
    store.delete_with(JobFiles(store, stored, folders, containers=containers, keep_marker_for=keep_marker_for, at=at))


def containers_of(settings: Settings, installation: str) -> Containers | None:
    """Return what removes the containers of deleted jobs, if containers are enabled and the extra is installed."""
    if settings.docker_host is None or find_spec("aiodocker") is None:
        return None
    return JobContainers(
        settings.docker_host,
        installation,
        limits=limits_of(settings),
        log_cap=settings.log_max_bytes,
        state=settings.state,
    )


async def connected(settings: Settings, *, connections: int = 4, listen: bool = True) -> Store:
    """Open a store for the database alone."""
    return await open_store(
        settings.url,
        schema=settings.schema,
        connections=connections,
        listen=settings.listen and listen,
        listen_url=settings.listen_url,
        pooler=settings.pooler,
        answer_within=settings.lease_ttl / ANSWER_SHARE,
        defaults=settings.job_defaults,
    )


@asynccontextmanager
async def worker_of(
    settings: Settings,
    *,
    queues: Mapping[str, int],
    functions: FunctionRegistry | None = None,
    worker_id: str | None = None,
    at: StepHook | None = None,
    state: StateFolder | None = None,
    store: Store | None = None,
    artifacts: MakeArtifacts = folder_artifacts,
) -> AsyncIterator[Worker]:
    """Build a worker on its state folder, ready to run; it opens its own store unless one is given."""
    registry.load_plugins()
    state = state or StateFolder(settings.state)
    async with AsyncExitStack() as stack:
        if store is None:
            store = await store_of(settings, artifacts=artifacts)
            stack.push_async_callback(store.close)
        installation = await retry_while_starting(store.installation)
        shared = await retry_while_starting(
            lambda: open_shared_folder(settings.shared, installation, store.shared_folder)
        )
        host = RunnerHost(settings=settings, installation=installation, state=state, stack=stack)
        runners = await runners_of(host)
        yield Worker(
            store,
            installation=installation,
            shared=shared,
            artifacts=artifacts(settings, shared),
            settings=settings,
            queues=queues,
            runners=runners,
            checks=next(runner.checks for runner in runners if isinstance(runner, ProcessRunner)),
            functions=functions or FunctionRegistry(),
            locks=state.locks(installation),
            connect_beats=heartbeat_store_of(store, settings),
            worker_id=worker_id,
            at=at,
        )


async def runners_of(host: RunnerHost) -> list[Runner]:
    """Build every runner of the registry that can work here. The process runner is the first."""
    built: list[Runner] = []
    for descriptor in registry.runners().values():
        if descriptor.build is not None and (runner := await build_runner(descriptor, host)) is not None:
            _refuse_shared_domains(built, runner)
            built.append(runner)
    return built


def _refuse_shared_domains(built: Sequence[Runner], runner: Runner) -> None:
    """Refuse a runner with a domain of another one: workers that have only the other would adopt its attempts."""
    for other in built:
        if shared := set(other.domains) & set(runner.domains):
            names = f"runners {other.capability} and {runner.capability}"
            raise ConfigError([f"{names} have the same domain {min(shared)}: each needs domains of its own"])


async def build_runner(descriptor: RunnerDescriptor, host: RunnerHost) -> Runner | None:
    """Build a runner. An error of one that was installed names it, because the worker cannot start without it."""
    try:
        build: BuildRunner = registry.attribute(str(descriptor.build))
        runner = await build(host)
    except HoldfastError:
        raise
    except Exception as error:
        raise ConfigError([f"runner {descriptor.name} cannot be built: {type(error).__name__}: {error}"]) from error
    if runner is not None and runner.capability != descriptor.name:
        raise ConfigError([f"runner {descriptor.name} was built with the capability {runner.capability!r}"])
    return runner


def heartbeat_store_of(
    store: Store, settings: Settings
) -> Callable[[], Awaitable[tuple[HeartbeatStore, Callable[[], Awaitable[None]]]]]:
    """Return how the heartbeat reaches the store from its own thread.

    SQLite has one writer thread per process, where a beat is urgent. On Postgres the heartbeat has its own connection.
    """

    async def share() -> tuple[HeartbeatStore, Callable[[], Awaitable[None]]]:
        async def nothing() -> None:
            pass

        return store.leases, nothing

    async def connect() -> tuple[HeartbeatStore, Callable[[], Awaitable[None]]]:
        own = await connected(settings, connections=1, listen=False)
        return own.leases, own.close

    return share if isinstance(store.database, SqliteDatabase) else connect
