"""From a leased job to a plan, and from a plan to what a runner puts in place."""

import asyncio
from pathlib import Path

import msgspec

from holdfast.config import Settings
from holdfast.model import Lease
from holdfast.pipeline.connectors import CONNECTORS, Connector
from holdfast.pipeline.connectors.postgres import SQL
from holdfast.pipeline.copying import make_folder
from holdfast.pipeline.plan import Facts, Plan, plan, stage
from holdfast.pipeline.sources import Sources, inputs_of
from holdfast.runner.base import Runner
from holdfast.runner.space import Place, Programs, read_plan


class Staged:
    """A plan on its way to a runner."""

    def __init__(self, found: Plan, sources: Sources) -> None:
        self.plan = msgspec.json.encode(found)
        self._found = found
        self._connector = CONNECTORS[found.connector]
        self._sources = sources

    def programs(self, place: Place) -> Programs:
        tasks = tuple(self._connector.task(task, place) for task in self._found.tasks)
        return Programs(tasks=tasks, service=self._connector.service(place))

    def make_tree(self, tree: Path) -> None:
        make_folder(tree)

    def stage(self, inputs: Path) -> None:
        for task in self._found.tasks:
            stage(task, self._sources, inputs)
            if task.sql is not None:
                (inputs / SQL.format(n=task.n)).write_text(task.sql)


def sources_for(lease: Lease, settings: Settings) -> Sources:
    return Sources(inputs_of(settings.shared, lease.tenant))


async def facts_for(lease: Lease, runner: Runner, connector: Connector) -> Facts:
    """What is true where it would run: an image says all about the programs in it, else the host's are asked."""
    image = await runner.digest(lease.spec, lease.domain)
    return Facts(image=image, engine=await asyncio.to_thread(connector.engine) if image is None else None)


def plan_for(lease: Lease, settings: Settings, facts: Facts) -> Plan:
    """Plan a leased job by the files as they are now."""
    sources, secrets = sources_for(lease, settings), lease.policy.secrets
    return plan(lease.spec, sources, facts, tenant=lease.tenant, inputs=lease.inputs, secrets=secrets)


def plan_in(space: Path) -> Plan:
    """The plan of an attempt that runs."""
    return msgspec.json.decode(read_plan(space), type=Plan)
