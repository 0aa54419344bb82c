"""What a pipeline would do: for each task whether its snapshot exists, and if not, how it differs from the nearest.

Nothing is written and nothing runs. The plan is the server's: files as they are now, its own engine and programs.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool

from holdfast.model import Json, Snapshot
from holdfast.pipeline.identity import KnownSnapshot, explain, nearest
from holdfast.pipeline.plan import PipelinePlan, PlanFacts, make_plan
from holdfast.pipeline.sources import Sources, inputs_of
from holdfast.response_types import PlanView, TaskPlanView
from holdfast.store import Store

FactsOf = Callable[[Mapping[str, Any]], Awaitable[PlanFacts]]
"""Returns the facts of the host where the pipeline of a spec would run. It may raise Invalid."""
UNKNOWN = PlanFacts(image="not asked for")


async def refuse_bad_sources(spec: Mapping[str, Any], shared: Path, tenant: str) -> None:
    """Refuse a pipeline whose files cannot be read, before it is accepted."""
    await run_in_threadpool(make_plan, spec, Sources(inputs_of(shared, tenant)), UNKNOWN, tenant=tenant, inputs={})


async def plan_job(
    store: Store,
    spec: Mapping[str, Any],
    inputs: Json,
    shared: Path,
    facts: FactsOf,
    tenant: str,
    secrets: Sequence[str] = (),
) -> PlanView:
    """Plan the pipeline of a job and compare it with the existing snapshots."""
    sources, worker_facts = Sources(inputs_of(shared, tenant)), await facts(spec)
    found = await run_in_threadpool(
        make_plan, spec, sources, worker_facts, tenant=tenant, inputs=inputs, secrets=secrets
    )
    existing = await store.snapshots.existing([task.snapshot for task in found.tasks], tenant=tenant)
    near = await store.snapshots.near([task.parent for task in found.tasks], tenant=tenant)
    return plan_view(found, existing, near)


def plan_view(found: PipelinePlan, existing: Mapping[str, Snapshot], near: Sequence[Snapshot]) -> PlanView:
    """Say for each task whether it is cached, and if not, why."""
    candidates = [KnownSnapshot(id=one.id, parent=one.parent, components=one.components) for one in near]
    done = found.latest(set(existing))
    tasks = []
    for task in found.tasks:
        if task.n < done:
            reason = "its snapshot exists" if task.snapshot in existing else "a later task's snapshot exists"
            tasks.append(TaskPlanView(name=task.name, snapshot=task.snapshot, cached=True, reason=reason))
            continue
        miss = nearest(task.components, task.parent, candidates)
        tasks.append(
            TaskPlanView(
                name=task.name,
                snapshot=task.snapshot,
                cached=False,
                reason=explain(miss),
                nearest=miss.nearest if miss else None,
                differs=miss.differs if miss else (),
            )
        )
    return PlanView(plan=found.hash, runs=len(found.tasks) - done, tasks=tuple(tasks))
