"""Commands to a supervisor, which are repeated until it acknowledges them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.model import Lease, StopKind, StopPhase, StopRequest
from holdfast.runner.wire import Command
from holdfast.worker import supervisor_link
from holdfast.worker.held_leases import HeldLease, HeldLeases, LeaseLost, boottime
from holdfast.worker.stop_sequence import StopReason
from holdfast.worker.supervisor_link import SupervisorLink
from tests.unit.test_held_leases import lease


class Supervisor:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, int]] = []

    async def send(self, command: Command) -> None:
        self.sent.append((command.verb, command.token))


async def test_adopter_repeats_its_hold_only_after_a_while_and_until_it_is_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (held,) = HeldLeases(60.0).take([lease(3)], boottime())
    steps: list[str] = []
    link = SupervisorLink(cast(Any, SimpleNamespace(at=lambda step, _: steps.append(step))), held)
    supervisor = Supervisor()
    running = cast(Any, supervisor)
    await link.take_control_if_adopting(running)
    assert supervisor.sent == []
    link.adopted.clear()
    for _ in range(3):
        await link.take_control_if_adopting(running)
    assert supervisor.sent == [("hold", 3)]
    monkeypatch.setattr(supervisor_link, "ACK_SECONDS", -1.0)
    link.on_event({"event": "ack", "ok": True, "token": 2, "verb": "hold"})
    await link.take_control_if_adopting(running)
    assert (supervisor.sent, link.adopted.is_set(), steps) == ([("hold", 3)] * 2, False, [])
    link.on_event({"event": "ack", "ok": True, "token": 3, "verb": "hold"})
    await link.take_control_if_adopting(running)
    assert (supervisor.sent, link.adopted.is_set(), steps) == ([("hold", 3)] * 2, True, ["adopted"])


async def test_adopter_that_lost_its_lease_tells_the_supervisor_nothing() -> None:
    (held,) = HeldLeases(60.0).take([lease(3)], boottime())
    link = SupervisorLink(cast(Any, SimpleNamespace()), held)
    link.adopted.clear()
    held.lose()
    supervisor = Supervisor()
    with pytest.raises(LeaseLost):
        await link.take_control_if_adopting(cast(Any, supervisor))
    assert supervisor.sent == []


class Leases:
    """Answers what it is told to a stop phase, and keeps it."""

    def __init__(self, *answers: bool) -> None:
        self._answers = list(answers)
        self.phases: list[tuple[str, int, float | None]] = []

    async def advance_stop(self, lease: Lease, phase: StopPhase, *, grace: float | None = None) -> bool:
        self.phases.append((phase, lease.token, grace))
        return self._answers.pop(0)


def linked(*answers: bool) -> tuple[SupervisorLink, HeldLease, Leases]:
    (held,) = HeldLeases(60.0).take([lease(3)], boottime())
    leases = Leases(*answers)
    services = SimpleNamespace(at=lambda *_: None, store=SimpleNamespace(leases=leases))
    return SupervisorLink(cast(Any, services), held), held, leases


async def test_phases_of_a_requested_stop_are_recorded_once_with_the_token() -> None:
    link, held, leases = linked(True, True)
    held.receive_stop(StopRequest(kind=StopKind.CANCEL, phase=StopPhase.REQUESTED))
    for event in ("signalled", "signalled", "killed"):
        link.on_event({"event": event, "reason": "cancelled"})
        await link.record_stop_phases()
    assert leases.phases == [("signalled", 3, held.lease.policy.stop_grace), ("killed", 3, None)]


async def test_phases_that_nobody_asked_for_are_not_recorded() -> None:
    link, held, leases = linked()
    link.stop.ask(StopReason.BUDGET)
    link.on_event({"event": "signalled", "reason": "cancelled"})
    await link.record_stop_phases()
    held.receive_stop(StopRequest(kind=StopKind.CANCEL, phase=StopPhase.REQUESTED))
    link.on_event({"event": "killed", "reason": "timed_out"})
    await link.record_stop_phases()
    assert leases.phases == []


async def test_stop_phase_that_the_store_refuses_means_that_the_lease_is_lost() -> None:
    """Proves L4."""
    link, held, _ = linked(False)
    held.receive_stop(StopRequest(kind=StopKind.CANCEL, phase=StopPhase.REQUESTED))
    link.on_event({"event": "signalled", "reason": "cancelled"})
    with pytest.raises(LeaseLost):
        await link.record_stop_phases()
