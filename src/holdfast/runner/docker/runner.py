"""Starts, finds and sweeps containers on one Docker engine, which may come and go.

A container's name says whose it is: installation, job, attempt. Create and start are two calls, with a look at the
record in between and the start by id: a worker that slept meanwhile starts nothing, since whoever went on without it
removed what it had created. A container that was only created ran nothing; it is removed and made anew.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.errors import Invalid
from holdfast.runner.base import CannotStart, Confirm, EngineUnreachable, Identity, Limits, Order, State
from holdfast.runner.docker import recipe
from holdfast.runner.docker.archive import only_file
from holdfast.runner.docker.container import Container, boottime
from holdfast.runner.docker.engine import Engine, Gone, Image, Info, Refusal, Seen
from holdfast.runner.docker.recipe import Clock
from holdfast.runner.docker.spaces import Spaces
from holdfast.runner.docker.turns import Turn, Turns
from holdfast.runner.process import LEAST_OUTPUT, OUTPUT_FACTOR
from holdfast.runner.spec import Command
from holdfast.runner.users import User
from holdfast.timing import jitter

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
CLOCK_SECONDS = 10.0
"""For how long a reading of the engine's clock is good."""
STARTS = 2
"""How many containers are made at a time, for each processor of the engine: more at once are made no faster."""
TRIES = 5
"""How often a container is made anew that somebody else removed before its start."""
SETTLE_SECONDS = 0.5
USUAL_ROOT = "/var/lib/docker"
GRACE_SECONDS = 300.0
"""A leftover younger than this is left alone."""
FEW = 10
UNUSUAL = 0.5
"""More than a few leftovers, and more than this share of all that is here, are a sign of a wrong database."""
GOING_DOWN = (
    "transport is closing",
    "containerd.sock",
    "context canceled",
    "connection error",
    "shutting down",
    "ttrpc",
)
"""Words of an engine that fails because it is being stopped, not because of what was asked."""


class DockerRunner:
    capability = "docker"

    def __init__(self, engine: Engine, installation: str, *, limits: Limits, log_cap: int, state: Path) -> None:
        self.engine = engine
        self.spaces = Spaces(state / "spaces" / installation)
        self.clock = Clock(0.0, 0.0)
        self._installation = installation
        self._limits = limits
        self._output_cap = max(log_cap * OUTPUT_FACTOR, LEAST_OUTPUT)
        self._domain = ""
        self._away: str | None = f"the Docker engine at {engine.host} was not asked yet"
        self._verified = ("", -1)
        self._doubted = asyncio.Event()
        self._state = state
        self._turns = Turns(state / "turns", "", STARTS)
        self._starting: dict[asyncio.Task[Any] | None, Turn] = {}
        self._created: dict[Identity, float] = {}
        self._over: frozenset[Identity] | None = None

    # The engine

    @property
    def away(self) -> str | None:
        return self._away

    @property
    def domain(self) -> str:
        return self._domain

    @property
    def domains(self) -> Sequence[str]:
        return [self._domain] if self._away is None else []

    async def watch(self, changed: Callable[[], None]) -> None:
        told = (self.domains, self.away)
        while True:
            await self.check()
            if told != (self.domains, self.away):
                told = (self.domains, self.away)
                changed()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(jitter(LOOK_SECONDS)):
                    await self._doubted.wait()
            self._doubted.clear()
            await asyncio.sleep(0.05)

    def doubt(self) -> None:
        """Somebody met an engine that does not answer: have a look at once."""
        self._doubted.set()

    async def check(self) -> None:
        """Find out whether the engine is there, and whether it is the same."""
        try:
            if self._away is None and boottime() - self.clock.ours < CLOCK_SECONDS:
                await self.engine.ping()
                return
            self._known(await self.engine.info())
        except EngineUnreachable as error:
            self._gone(str(error))
        except Refusal as error:
            self._gone(f"the Docker engine at {self.engine.host} refuses us: {error}")

    def _gone(self, why: str) -> None:
        if self._away is None:
            log.warning("%s; its containers are left alone until it is back", why)
        self._away = why

    def _known(self, info: Info) -> None:
        """Note which engine it is, and its clock: read at the latest now."""
        self.clock = Clock(info.time, boottime())
        domain = domain_of(info)
        if self._away is not None or domain != self._domain:
            log.info("the Docker engine at %s is %s on %s", self.engine.host, domain, info.host)
        self._domain, self._away = domain, None
        if (made_for := (domain, STARTS * max(1, info.processors))) != self._turns.made_for:
            self._turns = Turns(self._state / "turns", *made_for)

    async def verify(self, domain: str) -> None:
        """Make sure that the engine which just answered is the one of this domain; only then "not found" counts."""
        connections = self.engine.connections
        try:
            info = await self.engine.info()
        except Refusal as error:
            raise EngineUnreachable(f"the Docker engine at {self.engine.host} is not well: {error}") from error
        if domain_of(info) != domain:
            self.doubt()
            raise EngineUnreachable(f"the Docker engine at {self.engine.host} is {domain_of(info)}, not {domain}")
        self._verified = (domain, connections)

    async def same_engine(self, domain: str) -> None:
        """Like `verify`, at no cost while no connection is newer than the last look: those lead where they led."""
        if self._verified != (domain, self.engine.connections):
            await self.verify(domain)

    async def _fresh_clock(self) -> Clock:
        if boottime() - self.clock.ours > CLOCK_SECONDS:
            self._known(await self.engine.info())
        return self.clock

    # Start and find

    @contextlib.asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """It ends when the engine has started the container, whatever becomes of that one then.

        It belongs to the task: of one attempt there may be two here, when we adopt what we have lost a moment before.
        """
        self._starting[asyncio.current_task()] = await self._turns.take()
        try:
            yield
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        if (turn := self._starting.pop(asyncio.current_task(), None)) is not None:
            turn.end()

    async def start(self, order: Order, confirm: Confirm) -> Container:
        try:
            return await self._start(order, confirm)
        except EngineUnreachable:
            self.doubt()
            raise
        except Invalid as error:
            raise CannotStart("contract_violation", str(error)) from error

    async def _start(self, order: Order, confirm: Confirm) -> Container:
        image = await self._image(order.spec, order.domain)
        space = None if order.pipeline is None else self.spaces.make(order.identity, self.engine.host)
        for _ in range(TRIES):
            try:
                created = await self.engine.create(
                    recipe.name_of(order.identity), recipe.config_of(order, image, self._limits, space)
                )
            except Refusal as error:
                if error.status != 409:
                    raise await self._cannot(error, order.domain, "create its container") from error
                found = await self._already_there(order, confirm)
                if found is not None:
                    return found
                continue
            seen = await self._fill_and_start(created, order, image, space, confirm)
            if seen is not None:
                self._end_turn()
                container = Container(self, order.identity, seen, order.domain, ours=True)
                await container.begun()
                return container
        raise CannotStart("start_failed", "its container was removed again and again before it could start")

    async def digest(self, spec: Mapping[str, Any], domain: str) -> str | None:
        return (await self._image(spec, domain)).id

    async def _image(self, spec: Mapping[str, Any], domain: str) -> Image:
        name = spec["image"]
        try:
            return await self.engine.image(name)
        except Gone:
            await self.verify(domain)
            message = f"there is no image {name} on the Docker engine at {self.engine.host}: pull or build it there"
            raise CannotStart("image_missing", message) from None
        except Refusal as error:
            raise await self._cannot(error, domain, f"look at image {name}") from error

    async def _already_there(self, order: Order, confirm: Confirm) -> Container | None:
        """The name is taken: by this very attempt, which is then adopted, unless it never ran; by nothing else."""
        name = recipe.name_of(order.identity)
        try:
            seen = await self.engine.inspect(name)
        except Gone:
            return None
        wanted = {**recipe.labels_of(order.identity), recipe.HASH: recipe.hash_of(order)}
        if any(seen.labels.get(label) != value for label, value in wanted.items()):
            message = f"there is a container {name} which was not made for this attempt: remove it, and resume the job"
            raise CannotStart("start_failed", message)
        container = Container(self, order.identity, seen, order.domain)
        if await container.look() != "missing":
            return container
        container.close()
        await confirm()
        # Not by force: one that a woken worker has started at this moment is refused, and adopted in the next round.
        with contextlib.suppress(Refusal):
            await self.engine.remove(seen.id)
        return None

    async def _fill_and_start(
        self, created: str, order: Order, image: Image, space: Path | None, confirm: Confirm
    ) -> Seen | None:
        """Put the files in, ask whether it is still ours, start it. None: somebody removed it before."""
        try:
            user = await self._user(created, recipe.user_in(order), order.spec["image"])
            spec = recipe.spec_of(order, image, user, await self._fresh_clock(), output_cap=self._output_cap)
            if order.pipeline is not None and space is not None:
                await self.spaces.fill(space, order.pipeline, user)
            files = await asyncio.to_thread(recipe.files_of, order, spec, user)
            await self.engine.put(created, recipe.VOLUME, files)
            # The record says where it can be found. On any other engine its id is unknown, and the start fails.
            await self.same_engine(order.domain)
            await confirm()
            await self.engine.start(created)
            return await self.engine.inspect(created)
        except (CannotStart, Invalid):
            await self._drop(created)
            raise
        except Gone as error:
            return await self._unless_gone(created, order, error)
        except Refusal as error:
            cannot = await self._cannot(error, order.domain, "start its container", created)
            await self._drop(created)
            raise cannot from error

    async def _unless_gone(self, created: str, order: Order, error: Gone) -> Seen | None:
        """Not found: the container itself, or something that it names, such as a network."""
        try:
            await self.engine.inspect(created)
        except Gone:
            return None
        await self._drop(created)
        raise await self._cannot(error, order.domain, "start its container") from error

    async def _drop(self, created: str) -> None:
        with contextlib.suppress(Refusal):
            await self.engine.remove(created)

    async def _cannot(self, error: Refusal, domain: str, what: str, created: str | None = None) -> CannotStart:
        """Say why something was refused; an engine that is going down has no reason that counts."""
        if error.status >= 500:
            await asyncio.sleep(SETTLE_SECONDS)
            if any(word in str(error) for word in GOING_DOWN):
                raise EngineUnreachable(f"the Docker engine at {self.engine.host} could not {what}: {error}")
            await self.verify(domain)
            if created is not None and (await self.engine.inspect(created)).status != "created":
                raise EngineUnreachable(f"the Docker engine at {self.engine.host} is of two minds: {error}")
        return CannotStart("start_failed", f"the Docker engine could not {what}: {error}")

    async def find(self, identity: Identity, domain: str, *, stdout: int, stderr: int) -> tuple[State, Container]:
        try:
            seen = await self._seen(identity, domain)
            container = Container(self, identity, seen, domain, stdout=stdout, stderr=stderr)
            return await container.look(), container
        except EngineUnreachable:
            self.doubt()
            raise
        except Refusal as error:
            raise EngineUnreachable(f"the Docker engine at {self.engine.host} is not well: {error}") from error

    async def _seen(self, identity: Identity, domain: str) -> Seen | None:
        """Look for an attempt's container; None only by the word of a healthy engine, the one where it ran."""
        try:
            seen = await self.engine.inspect(recipe.name_of(identity))
        except Gone:
            await self.verify(domain)
            return None
        return seen if recipe.identity_in(seen.labels) == identity else None

    async def user_of(self, seen: Seen | None) -> User | None:
        """Whom a container runs as, in numbers."""
        if seen is None:
            return None
        return recipe.to_user(seen.user) or recipe.to_user(seen.user, await self._passwd(seen.id))

    async def _user(self, created: str, name: str, image: str) -> User:
        user = recipe.to_user(name) or recipe.to_user(name, await self._passwd(created))
        if user is None:
            raise CannotStart("command_missing", f"there is no user {name} in image {image}")
        return user

    async def _passwd(self, container: str) -> bytes:
        with contextlib.suppress(Gone):
            async with contextlib.aclosing(self.engine.get(container, "/etc/passwd")) as tar:
                return b"".join([chunk async for chunk in only_file(tar)])
        return b""

    # Sweeping

    @property
    def _label(self) -> str:
        return f"{recipe.INSTALLATION}={self._installation}"

    async def forbid(self, identity: Identity, domain: str) -> bool:
        """Remove a container that ran nothing: whoever made it starts it by its id, which is gone then.

        Not by force: one that is started at this moment is refused, and stands.
        """
        seen = await self._seen(identity, domain)
        if seen is None:
            return True
        if await Container(self, identity, seen, domain).look() != "missing":
            return False
        await self._drop(seen.id)
        return await self._seen(identity, domain) is None

    async def left_over(self) -> Sequence[Identity]:
        found = await self.engine.containers(self._label)
        self._created = {one: at for _, labels, at in found if (one := recipe.identity_in(labels)) is not None}
        return list(self._created)

    def to_sweep(self, over: Sequence[Identity], found: int) -> Sequence[Identity]:
        """Old ones that were over at the last look already; none if that would be most of what is here."""
        before, self._over = self._over, frozenset(over)
        if before is None:
            return []
        now = self.clock.at(boottime())
        old = [one for one in over if one in before and now - self._created.get(one, now) > GRACE_SECONDS]
        if len(old) > FEW and len(old) > found * UNUSUAL:
            log.error(
                "%d of %d containers of this installation have no open attempt in the record, which is unusual: is "
                "this the right database? They are left alone; remove them by hand, with `docker rm -v`, if it is",
                len(old),
                found,
            )
            return []
        return old

    async def sweep(self, identity: Identity) -> bool:
        seen = await self._seen(identity, self._domain)
        if seen is None:
            return True
        if seen.runs:
            container = Container(self, identity, seen, self._domain)
            await container.tell(Command(token=time.time_ns(), verb="stop", kind="cancel"))
            container.close()
            return False
        with contextlib.suppress(Gone):
            await self.engine.remove(seen.id)
        await self.spaces.clear(identity)
        return True

    async def sweep_halves(self, older: float) -> int:
        """Remove volumes and workspaces of ours that no container has: never registered, or removed alone."""
        gone = await self.spaces.sweep(await self.left_over(), older)
        async for name in self._loose(older):
            with contextlib.suppress(Refusal):
                await self.engine.remove_volume(name)
                gone += 1
        return gone

    async def _loose(self, older: float) -> AsyncIterator[str]:
        now = (await self._fresh_clock()).at(boottime())
        for name, created in await self.engine.loose_volumes(self._label):
            if now - created > older:
                yield name


def domain_of(info: Info) -> str:
    """Name an engine. Engines beside each other on one host may share their id, but not their folder."""
    return f"docker:{info.id}" if info.root == USUAL_ROOT else f"docker:{info.id}:{info.root}"
