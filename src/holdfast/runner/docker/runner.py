"""Starts, finds and sweeps containers on one Docker engine, which may be unreachable at times.

A container's name contains its identity: installation, job, attempt. Create and start are two calls, with a check of
the lease in between, and the start is by container id. So a worker that was suspended meanwhile starts nothing: the new
owner has removed its container. A container that was only created ran nothing; it is removed and created again.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import Invalid
from holdfast.runner.base import (
    AttemptState,
    CannotStart,
    ConfirmLease,
    ContainerLimits,
    EngineUnreachable,
    Identity,
    NoSpace,
    StartRequest,
)
from holdfast.runner.docker import container_config
from holdfast.runner.docker.container import ContainerHandle, boottime
from holdfast.runner.docker.container_removal import ContainerRemover
from holdfast.runner.docker.docker_workspace import DockerWorkspaces
from holdfast.runner.docker.engine import ContainerInfo, Engine, EngineError, ImageInfo, NoSuchObject
from holdfast.runner.docker.engine_events import EngineEvents
from holdfast.runner.docker.engine_watch import EngineWatch
from holdfast.runner.docker.hosts_file import HostsFile
from holdfast.runner.docker.image_users import ImageUsers
from holdfast.runner.docker.start_slots import StartSlot, StartSlots
from holdfast.runner.spec_limits import LEAST_OUTPUT, OUTPUT_FACTOR
from holdfast.runner.start_pause import needs_space
from holdfast.runner.wire import Command

log = logging.getLogger(__name__)

STARTS = 2
"""Concurrent container starts per processor of the engine: more at once are not faster."""
TRIES = 5
"""How often a container is created again that another worker removed before its start."""
SETTLE_SECONDS = 0.5
GRACE_SECONDS = 300.0
"""Containers younger than this many seconds are not swept."""
FEW = 10
UNUSUAL = 0.5
"""More than FEW leftovers, and more than this share of all containers, suggest a wrong database."""
GOING_DOWN = (
    "transport is closing",
    "containerd.sock",
    "context canceled",
    "connection error",
    "shutting down",
    "ttrpc",
)
"""Error texts of an engine that fails because it is shutting down, not because of the request."""
NO_SPACE = ("no space left on device", "disk quota exceeded")
"""Error texts of an engine whose disk is full."""


class DockerRunner:
    capability = "docker"

    def __init__(
        self,
        engine: Engine,
        installation: str,
        *,
        limits: ContainerLimits,
        log_cap: int,
        state: Path,
        allow_root: bool = False,
    ) -> None:
        self.engine = engine
        self.workspaces = DockerWorkspaces(state / "spaces" / installation)
        self.engine_watch = EngineWatch(engine)
        self._installation = installation
        self.events = EngineEvents(engine, self.engine_watch, self._label)
        self.remover = ContainerRemover(engine)
        self._hosts = HostsFile(engine, self.engine_watch)
        self._limits = limits
        self.users = ImageUsers(engine, allow_root=allow_root)
        self._output_cap = max(log_cap * OUTPUT_FACTOR, LEAST_OUTPUT)
        self._state = state
        self._start_slots = StartSlots(state / "turns", "", STARTS)
        self._starting: dict[asyncio.Task[Any] | None, StartSlot] = {}
        self._created: dict[Identity, float] = {}
        self._over: frozenset[Identity] | None = None

    # The engine

    @property
    def away(self) -> str | None:
        return self.engine_watch.away

    def pause(self, why: str) -> None:
        self.engine_watch.pause(why)

    @property
    def paused(self) -> str | None:
        return self.engine_watch.paused

    @property
    def domain(self) -> str:
        return self.engine_watch.domain

    @property
    def domains(self) -> Sequence[str]:
        return self.engine_watch.domains

    async def watch(self, changed: Callable[[], None]) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self.events.follow())
            group.create_task(self.engine_watch.watch(changed))

    async def check(self) -> None:
        await self.engine_watch.check()

    def note_failure(self) -> None:
        self.engine_watch.note_failure()

    # Start and find

    @contextlib.asynccontextmanager
    async def start_slot(self) -> AsyncIterator[None]:
        """Take a start slot until the engine has started the container.

        The slot belongs to the task, not to the attempt: there may be two executions of an attempt here, when we adopt
        one that we lost a moment before.
        """
        self._starting[asyncio.current_task()] = await self._slots().take()
        self.remover.start_begins()
        try:
            yield
        finally:
            self._release_slot()

    def _slots(self) -> StartSlots:
        """Return the start slots of the engine as it is now: another engine has others."""
        made_for = (self.domain, STARTS * self.engine_watch.processors)
        if made_for != self._start_slots.made_for:
            self._start_slots = StartSlots(self._state / "turns", *made_for)
        return self._start_slots

    def _release_slot(self) -> None:
        if (slot := self._starting.pop(asyncio.current_task(), None)) is not None:
            slot.release()
            self.remover.start_ended()

    async def start(self, request: StartRequest, confirm: ConfirmLease) -> ContainerHandle:
        try:
            return await self._start(request, confirm)
        except EngineUnreachable:
            self.note_failure()
            raise
        except Invalid as error:
            raise CannotStart("contract_violation", str(error)) from error

    async def _start(self, request: StartRequest, confirm: ConfirmLease) -> ContainerHandle:
        image = await self._image(request.spec, request.domain)
        with needs_space("cannot make the workspace"):
            workspace = None if request.pipeline is None else self.workspaces.make(request.identity, self.engine.host)
        for _ in range(TRIES):
            try:
                created = await self._create(request, image, workspace)
            except EngineError as error:
                if error.status != 409:
                    raise await self._cannot(error, request.domain, "create its container") from error
                found = await self._already_there(request, confirm)
                if found is not None:
                    return found
                continue
            if await self._fill_and_start(created.id, request, image, workspace, confirm):
                self._release_slot()
                container = ContainerHandle(self, request.identity, created, request.domain, ours=True)
                await container.wait_until_begun()
                return container
        raise CannotStart("start_failed", f"its container was removed {TRIES} times before it could start")

    async def _create(self, request: StartRequest, image: ImageInfo, workspace: Path | None) -> ContainerInfo:
        """Create the container. Return it as it will be once it runs."""
        name = container_config.name_of(request.identity)
        hosts = self._hosts.of(request)
        config = container_config.config_of(request, image, self._limits, workspace, hosts)
        try:
            created = await self.engine.create(name, config)
        except EngineError as error:
            if hosts is None or not self._hosts.refused(error):
                raise
            return await self._create(request, image, workspace)
        return ContainerInfo(id=created, labels=config["Labels"], status="running", user=config["User"])

    async def digest(self, spec: Mapping[str, Any], domain: str) -> str | None:
        return (await self._image(spec, domain)).id

    async def _image(self, spec: Mapping[str, Any], domain: str) -> ImageInfo:
        name = spec["image"]
        try:
            return await self.engine.image(name)
        except NoSuchObject:
            await self.engine_watch.verify(domain)
            message = f"there is no image {name} on the Docker engine at {self.engine.host}: pull or build it there"
            raise CannotStart("image_missing", message) from None
        except EngineError as error:
            raise await self._cannot(error, domain, f"look at image {name}") from error

    async def _already_there(self, request: StartRequest, confirm: ConfirmLease) -> ContainerHandle | None:
        """Return the container that has this attempt's name; if it never ran, remove it and return None.

        Raise CannotStart if it was not made for this attempt.
        """
        name = container_config.name_of(request.identity)
        try:
            seen = await self.engine.inspect(name)
        except NoSuchObject:
            return None
        wanted = {
            **container_config.labels_of(request.identity),
            container_config.HASH: container_config.hash_of(request),
        }
        if any(seen.labels.get(label) != value for label, value in wanted.items()):
            message = f"container {name} exists but was not made for this attempt: remove it, and resume the job"
            raise CannotStart("start_failed", message)
        container = ContainerHandle(self, request.identity, seen, request.domain)
        if await container.read_state() != "missing":
            return container
        container.close()
        await confirm()
        # Without force: if a resumed worker starts it at this moment, the removal fails and the next round adopts it.
        with contextlib.suppress(EngineError):
            await self.engine.remove(seen.id)
        return None

    async def _fill_and_start(
        self, created: str, request: StartRequest, image: ImageInfo, workspace: Path | None, confirm: ConfirmLease
    ) -> bool:
        """Copy the files in, check the lease, and start the container. False: it is gone; create it again."""
        try:
            user = await self.users.find(created, container_config.user_in(request), request.spec["image"])
            clock = await self.engine_watch.fresh_clock()
            spec = container_config.spec_of(
                request, image, user, clock, limits=self._limits, output_cap=self._output_cap
            )
            if request.pipeline is not None and workspace is not None:
                with needs_space("cannot fill the workspace"):
                    await self.workspaces.fill(workspace, request.pipeline, user)
            files = await asyncio.to_thread(container_config.files_of, request, spec, user)
            await self.engine.put(created, container_config.VOLUME, files)
            # The record names its engine. Any other engine does not know the id, and the start fails.
            await self.engine_watch.same_engine(request.domain)
            await confirm()
            await self.engine.start(created)
            return True
        except (CannotStart, Invalid, NoSpace):
            await self._drop(created)
            raise
        except NoSuchObject as error:
            await self._unless_gone(created, request, error)
            return False
        except EngineError as error:
            if self._hosts.refused(error):
                await self._drop(created)
                return False
            cannot = await self._cannot(error, request.domain, "start its container", created)
            await self._drop(created)
            raise cannot from error

    async def _unless_gone(self, created: str, request: StartRequest, error: NoSuchObject) -> None:
        """Return if the container is gone; raise if something that it names is missing, such as a network."""
        try:
            await self.engine.inspect(created)
        except NoSuchObject:
            return
        await self._drop(created)
        raise await self._cannot(error, request.domain, "start its container") from error

    async def _drop(self, created: str) -> None:
        with contextlib.suppress(EngineError):
            await self.engine.remove(created)

    async def _cannot(self, error: EngineError, domain: str, what: str, created: str | None = None) -> Exception:
        """Return the error for a refused call. Raise EngineUnreachable if the engine is shutting down."""
        if error.status >= 500:
            await asyncio.sleep(SETTLE_SECONDS)
            if any(word in str(error) for word in GOING_DOWN):
                raise EngineUnreachable(f"the Docker engine at {self.engine.host} could not {what}: {error}")
            await self.engine_watch.verify(domain)
            if created is not None and (await self.engine.inspect(created)).status != "created":
                raise EngineUnreachable(
                    f"the Docker engine at {self.engine.host} failed a start that it carried out: {error}"
                )
        message = f"the Docker engine could not {what}: {error}"
        if any(words in message.lower() for words in NO_SPACE):
            return NoSpace(message)
        return CannotStart("start_failed", message)

    async def find(
        self, identity: Identity, domain: str, *, stdout: int, stderr: int
    ) -> tuple[AttemptState, ContainerHandle]:
        try:
            seen = await self._seen(identity, domain)
            container = ContainerHandle(self, identity, seen, domain, stdout=stdout, stderr=stderr)
            return await container.read_state(), container
        except EngineUnreachable:
            self.note_failure()
            raise
        except EngineError as error:
            raise EngineUnreachable(f"the Docker engine at {self.engine.host} returned an error: {error}") from error

    async def _seen(self, identity: Identity, domain: str) -> ContainerInfo | None:
        """Look for an attempt's container. Return None only if the engine it ran on says that there is none."""
        try:
            seen = await self.engine.inspect(container_config.name_of(identity))
        except NoSuchObject:
            await self.engine_watch.verify(domain)
            return None
        return seen if container_config.identity_in(seen.labels) == identity else None

    # Sweeping

    @property
    def _label(self) -> str:
        return f"{container_config.INSTALLATION}={self._installation}"

    async def forbid(self, identity: Identity, domain: str) -> bool:
        """Remove a container that ran nothing: its creator would start it by its id, which is gone then.

        Without force: the removal fails if the container is started at this moment.
        """
        seen = await self._seen(identity, domain)
        if seen is None:
            return True
        if await ContainerHandle(self, identity, seen, domain).read_state() != "missing":
            return False
        await self._drop(seen.id)
        return await self._seen(identity, domain) is None

    async def remaining_attempts(self) -> Sequence[Identity]:
        found = await self.engine.containers(self._label)
        self._created = {
            one: at for _, labels, at in found if (one := container_config.identity_in(labels)) is not None
        }
        return list(self._created)

    def to_sweep(self, over: Sequence[Identity], found: int) -> Sequence[Identity]:
        """Return old containers that were also over in the last pass; none if that would be most of all containers."""
        before, self._over = self._over, frozenset(over)
        if before is None:
            return []
        now = self.engine_watch.clock.at(boottime())
        old = [one for one in over if one in before and now - self._created.get(one, now) > GRACE_SECONDS]
        if len(old) > FEW and len(old) > found * UNUSUAL:
            log.error(
                "%d of %d containers of this installation have no open attempt in the record, which is unusual: is "
                "this the right database? They are not removed; if it is, remove them by hand with `docker rm -v`",
                len(old),
                found,
            )
            return []
        return old

    async def sweep(self, identity: Identity) -> bool:
        seen = await self._seen(identity, self.domain)
        if seen is None:
            return True
        if seen.runs:
            container = ContainerHandle(self, identity, seen, self.domain)
            await container.send(Command(token=time.time_ns(), verb="stop", kind="cancel"))
            container.close()
            return False
        with contextlib.suppress(NoSuchObject):
            await self.engine.remove(seen.id)
        await self.workspaces.clear(identity)
        return True

    async def sweep_incomplete(self, older: float) -> int:
        """Remove volumes and workspaces of this installation that belong to no container."""
        gone = await self.workspaces.sweep(await self.remaining_attempts(), older)
        async for name in self._unused_volumes(older):
            with contextlib.suppress(EngineError):
                await self.engine.remove_volume(name)
                gone += 1
        return gone

    async def _unused_volumes(self, older: float) -> AsyncIterator[str]:
        now = (await self.engine_watch.fresh_clock()).at(boottime())
        for name, created in await self.engine.unused_volumes(self._label):
            if now - created > older:
                yield name
