"""Makes the plan of a leased pipeline, and stages it: the programs and files that the runner needs."""

import asyncio
from pathlib import Path

import msgspec

from holdfast import decoding
from holdfast.config import Settings
from holdfast.model import Lease
from holdfast.permissions import write_file
from holdfast.pipeline.connectors import Connector, connector_of
from holdfast.pipeline.connectors.base import SQL
from holdfast.pipeline.copying import make_folder
from holdfast.pipeline.plan import PipelinePlan, PlanFacts, make_plan, stage_files
from holdfast.pipeline.sources import Sources, inputs_of
from holdfast.runner.base import Runner
from holdfast.runner.workspace import Programs, WorkspacePaths, read_plan


class StagedPipeline:
    """A plan in the form that a runner needs."""

    def __init__(self, found: PipelinePlan, sources: Sources) -> None:
        self.plan = msgspec.json.encode(found)
        self._found = found
        self._connector = connector_of(found.connector)
        self._sources = sources

    def programs(self, paths: WorkspacePaths) -> Programs:
        tasks = tuple(self._connector.task(task, paths) for task in self._found.tasks)
        return Programs(tasks=tasks, service=self._connector.service(paths))

    def make_tree(self, tree: Path) -> None:
        make_folder(tree)

    def prepare(self, tree: Path, uid: int) -> bool:
        return self._found.base is None and self._connector.prepare(tree, uid)

    def stage(self, inputs: Path) -> None:
        for task in self._found.tasks:
            stage_files(task, self._sources, inputs)
            if task.sql is not None:
                write_file(inputs / SQL.format(n=task.n), task.sql.encode())


def sources_for(lease: Lease, settings: Settings) -> Sources:
    return Sources(inputs_of(settings.shared, lease.tenant))


async def facts_for(lease: Lease, runner: Runner, connector: Connector) -> PlanFacts:
    """Return what the plan depends on where it would run: the image's digest, or else the host's engine version."""
    image = await runner.digest(lease.spec, lease.domain)
    return PlanFacts(image=image, engine=await asyncio.to_thread(connector.engine) if image is None else None)


def plan_for(lease: Lease, settings: Settings, facts: PlanFacts) -> PipelinePlan:
    """Plan a leased job from the current files."""
    sources, secrets = sources_for(lease, settings), lease.policy.secrets
    return make_plan(lease.spec, sources, facts, tenant=lease.tenant, inputs=lease.inputs, secrets=secrets)


def plan_in(workspace: Path) -> PipelinePlan:
    """Read the plan of a running attempt."""
    return decoding.decode(read_plan(workspace), PipelinePlan)
