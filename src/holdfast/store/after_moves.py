"""What this process does after a commit that moved jobs: it counts, notifies workers, and settles dependants.

All moves that have such a consequence come here. It may be lost with the process: workers poll, and duties settle. What
must not be lost is written in the transaction of the move, by a subscriber in `on_move.sql`.
"""

from collections.abc import Iterable, Sequence

from holdfast.model import Gate
from holdfast.store.database import Database
from holdfast.store.gates import Gates
from holdfast.store.notify import Notifications, work_topic
from holdfast.store.outcomes import Ended
from holdfast.store.transitions import Moved


class AfterMoves:
    def __init__(self, database: Database, gates: Gates, notifications: Notifications) -> None:
        self._counters = database.counters
        self._gates = gates
        self._notifications = notifications

    def claimed(self, claimed: int, *, adopted: int = 0) -> None:
        """Count new attempts and adoptions."""
        self._counters.claims += claimed
        self._counters.adoptions += adopted

    async def ended(self, ended: Sequence[Ended], *, lost: int = 0, queues: Iterable[str] = ()) -> None:
        """Follow up on ended attempts. `lost` of them were lost; their lanes opened jobs in `queues`."""
        self._counters.finishes.update(end.status for end in ended)
        self._counters.losses += lost
        self.opened({*queues, *(end.queue for end in ended if end.gate == Gate.OPEN)})
        await self._gates.follow_up(settle=[end.id for end in ended if end.has_dependants])

    async def moved(self, moved: Moved) -> None:
        """Follow up on a job that was moved without a lease."""
        self.opened(moved.queues)
        if moved.unsettled or moved.unresolved:
            lane = moved.before["lane"]
            await self._gates.follow_up(
                [] if lane is None else [(moved.before["tenant"], lane)],
                [moved.before["id"]] if lane is None else [],
                settle=[moved.before["id"]] if moved.unsettled else [],
            )

    def opened(self, queues: Iterable[str]) -> None:
        """Notify workers of queues that got a claimable job."""
        self._notifications.post(work_topic(queue) for queue in queues)
