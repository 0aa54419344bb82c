"""What a worker can run here and now: the capabilities of its runners and functions, and the domains of attempts."""

from collections.abc import Mapping, Sequence

from holdfast import registry
from holdfast.model import FUNCTION, FUNCTION_DOMAIN, Claimable
from holdfast.runner.base import Runner
from holdfast.runner.disk import DATABASE, Disks
from holdfast.runner.function import FunctionRegistry


class Capabilities:
    def __init__(self, runners: Sequence[Runner], functions: FunctionRegistry, disks: Disks) -> None:
        self.runners: Mapping[str, Runner] = {runner.capability: runner for runner in runners}
        self._functions = functions
        self._disks = disks

    @property
    def available(self) -> list[str]:
        """The capabilities that can start jobs now."""
        away = self.away
        known = [*self.runners, *(f"{FUNCTION}:{name}" for name in self._functions.names)]
        return [capability for capability in known if capability not in away]

    @property
    def away(self) -> Mapping[str, str]:
        """Capabilities that cannot start jobs here now, and why: an unreachable engine or a full disk."""
        low = self._disks.low
        away = {runner.capability: why for runner in self.runners.values() if (why := runner.away) is not None}
        if low:
            away = {**dict.fromkeys(self.runners, next(iter(low.values()))), **away}
        if DATABASE in low:  # A function writes nothing but its result.
            away |= {f"{FUNCTION}:{name}": low[DATABASE] for name in self._functions.names}
        return away

    @property
    def domains(self) -> list[str]:
        """All domains in which attempts can be found."""
        return [FUNCTION_DOMAIN, *(domain for runner in self.runners.values() for domain in runner.domains)]

    def short_of_room(self, capability: str) -> str | None:
        """Name the full disk that blocks attempts of this capability; None if no disk does, or it cannot run anyway."""
        runner = self.runners.get(capability)
        full = self._disks.low or (runner is not None and runner.paused is not None)
        return self.away.get(capability) if full else None

    def domain_of(self, capability: str) -> str | None:
        """Return the domain in which an attempt of this capability would run; None if it cannot start here now."""
        if capability not in self.available:
            return None
        return self._domain(capability)

    def _domain(self, capability: str) -> str:
        """Return the domain of new attempts: that of the runner if they outlive the worker."""
        runner = self.runners.get(capability)
        return runner.domain if runner is not None and is_adoptable(capability) else FUNCTION_DOMAIN

    def claimable(self, queue: str) -> list[Claimable]:
        """Return what can be claimed from a queue now."""
        able = sorted(self.available, key=lambda capability: capability in self.runners)  # Functions first.
        return [Claimable(queue=queue, capability=capability, domain=self._domain(capability)) for capability in able]


def is_adoptable(capability: str) -> bool:
    """Return whether attempts of a runner outlive their worker; functions do not."""
    descriptor = registry.runners().get(capability.partition(":")[0])
    return descriptor is None or descriptor.adoptable
