"""What the parts of a run share: the peers that are there, in turns, and what becomes of one that breaks."""

import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from bench.peers.adapters import PEERS
from bench.peers.deployment import Deployments
from bench.peers.peer import Peer
from bench.peers.results import Part


@dataclass
class Run:
    """The options of a run, and its peers by the name that the command line uses."""

    deployments: Deployments
    peers: list[str]
    jobs: int
    rounds: int
    part: Part

    def jobs_of(self, peer: Peer) -> int:
        return max(100, int(self.jobs * peer.share))

    async def in_turns(
        self,
        measure: Callable[["Run", str, Peer], Awaitable[None]],
        rounds: int | None = None,
        suits: Callable[[Peer], bool] = lambda _: True,
    ) -> None:
        """Measure every peer once per round, each round beginning with another one.

        A peer that breaks is named with its reason and left out from then on: the others go on.
        """
        names = [name for name in self.peers if suits(PEERS[name])]
        for number in range(self.rounds if rounds is None else rounds):
            first = number % max(1, len(names))
            for name in names[first:] + names[:first]:
                if name in self.part.failed:
                    continue
                try:
                    await measure(self, name, PEERS[name])
                    print(f"  round {number + 1}: {name}: {self._last(name)}", flush=True)
                except Exception as error:
                    self.part.failed[name] = f"round {number + 1}: {str(error).splitlines()[0]}"
                    print(f"  round {number + 1}: {name} FAILED", flush=True)
                    traceback.print_exc()

    def _last(self, name: str) -> str:
        return ", ".join(f"{measure} {values[-1]:,.2f}" for measure, values in self.part.series.get(name, {}).items())
