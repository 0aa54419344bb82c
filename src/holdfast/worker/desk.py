"""What every execution of a worker shares: the store, the gathered writes, the settings, and the way out."""

import asyncio
from collections.abc import Callable, Sequence

from holdfast.config import Settings
from holdfast.model import Lease, StopRequest
from holdfast.runner.inputs import Inputs
from holdfast.runner.outputs import Artifacts
from holdfast.runner.shared_folder import SharedFolder
from holdfast.store import Store
from holdfast.worker.completer import Gatherer, finishes, hand_overs, starts

Step = Callable[[str, Lease], None]


def _no_step(name: str, lease: Lease) -> None:
    """Where tests stop or kill a worker, nothing happens."""


class Desk:
    def __init__(
        self,
        store: Store,
        worker: str,
        settings: Settings,
        installation: str,
        shared: SharedFolder,
        at: Step | None = None,
    ) -> None:
        self.store = store
        self.worker = worker
        self.settings = settings
        self.installation = installation
        self.shared = shared
        self.at = at or _no_step
        self.artifacts = Artifacts(settings.shared, check=shared.check)
        self.inputs = Inputs(settings.shared)
        self.finishes = finishes(store)
        self.starts = starts(store)
        self.hand_overs = hand_overs(store)
        self.stops: Gatherer[Lease, StopRequest | None] = Gatherer(self._read_stops, linger=0.0)
        self.leaving = asyncio.Event()

    async def _read_stops(self, leases: Sequence[Lease]) -> Sequence[StopRequest | None]:
        stops = await self.store.leases.stops(self.worker)
        return [stops.get(lease.id) for lease in leases]

    def writers(self) -> Sequence[Gatherer[object, object]]:
        """The gatherers to run; the finishes twice, so that one round trip overlaps the next."""
        return [self.finishes, self.finishes, self.starts, self.hand_overs, self.stops]  # type: ignore[list-item]
