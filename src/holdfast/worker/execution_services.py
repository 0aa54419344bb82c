"""What all executions of a worker share: the store, the batch writers, the settings, and the drain signal."""

import asyncio
from collections.abc import Callable, Mapping, Sequence

from holdfast.config import Settings
from holdfast.model import Lease, Policy, StopRequest
from holdfast.runner.artifacts import ArtifactStore
from holdfast.runner.checks import ReadinessChecks
from holdfast.runner.disk import disks_of
from holdfast.runner.secrets import find_secrets
from holdfast.runner.shared_folder import SharedFolder
from holdfast.store import Store
from holdfast.worker.batch_writer import BatchWriter, finishes, hand_overs, starts

StepHook = Callable[[str, Lease], None]


def _no_step(name: str, lease: Lease) -> None:
    """Do nothing at a step; tests pass a function that stops or kills the worker there."""


class HandOverRequested(Exception):
    """This worker drains. The attempt keeps running, and the next worker adopts it."""


class ExecutionServices:
    def __init__(
        self,
        store: Store,
        worker: str,
        settings: Settings,
        installation: str,
        shared: SharedFolder,
        checks: ReadinessChecks,
        artifacts: ArtifactStore,
        at: StepHook | None = None,
    ) -> None:
        self.store = store
        self.worker = worker
        self.settings = settings
        self.installation = installation
        self.shared = shared
        self.checks = checks
        self.at = at or _no_step
        self.disks = disks_of(settings, state=True)
        self.artifacts = artifacts
        self.finishes = finishes(store)
        self.starts = starts(store)
        self.hand_overs = hand_overs(store)
        self.stops: BatchWriter[Lease, StopRequest | None] = BatchWriter(self._read_stops, linger=0.0)
        self.draining = asyncio.Event()

    def secrets(self, policy: Policy) -> Mapping[str, str]:
        """Return the secrets that a job names. Raise CannotStart if one is not set on this worker."""
        return find_secrets(policy.secrets, self.settings.secrets_dir)

    async def _read_stops(self, leases: Sequence[Lease]) -> Sequence[StopRequest | None]:
        stops = await self.store.leases.stop_requests(self.worker)
        return [stops.get(lease.id) for lease in leases]

    def writers(self) -> Sequence[BatchWriter[object, object]]:
        """Return the batch writers to run; finishes twice, so that their round trips overlap."""
        return [self.finishes, self.finishes, self.starts, self.hand_overs, self.stops]  # type: ignore[list-item]
