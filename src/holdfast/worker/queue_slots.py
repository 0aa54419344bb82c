"""The slots of a worker, per queue: how many are busy, and which queues may have something to claim."""

from collections import Counter
from collections.abc import Mapping

CLEARING = 32
"""Maximum ended attempts that are still being cleaned up; above this, nothing new is claimed."""


class QueueSlots:
    """`queues` maps each queue to its number of slots."""

    def __init__(self, queues: Mapping[str, int]) -> None:
        self.queues = dict(queues)
        self.to_claim = set(self.queues)
        """Queues that may have something to claim."""
        self.capped: set[str] = set()
        """Queues with a cap across all workers, as of the last claims."""
        self.clearing = 0
        """Ended attempts whose slots are free but whose files are still being removed."""
        self._busy: Counter[str] = Counter()

    def take(self, queue: str) -> None:
        if queue in self.queues:
            self._busy[queue] += 1

    def release(self, queue: str) -> None:
        if queue in self.queues:
            self._busy[queue] -= 1
            if queue in self.capped:
                self.to_claim.add(queue)  # The last claim may have been short only because of the cap.

    def end_clearing(self) -> bool:
        """Count an attempt as cleaned up. Return whether claims, which had to wait for that, are possible again."""
        self.clearing -= 1
        return self.clearing == CLEARING - 1

    def free(self, queue: str) -> int:
        return self.queues[queue] - self._busy[queue] if self.clearing < CLEARING else 0

    @property
    def any_free(self) -> bool:
        return any(self.free(queue) > 0 for queue in self.queues)

    @property
    def backlog(self) -> bool:
        """Whether a queue that may have work has a free slot for it."""
        return any(self.free(queue) > 0 for queue in self.to_claim)

    def claim_from_all(self) -> None:
        """Note that every queue may have something to claim."""
        self.to_claim.update(self.queues)
