"""Commands to a supervisor, which are repeated until it acknowledges them."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from holdfast.runner.wire import Command
from holdfast.worker import supervisor_link
from holdfast.worker.held_leases import HeldLeases, LeaseLost, boottime
from holdfast.worker.supervisor_link import SupervisorLink
from tests.unit.test_held_leases import lease


class Supervisor:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    async def send(self, command: Command) -> None:
        self.told.append((command.verb, command.token))


async def test_adopter_repeats_its_hold_only_after_a_while_and_until_it_is_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (held,) = HeldLeases(60.0).take([lease(3)], boottime())
    steps: list[str] = []
    link = SupervisorLink(cast(Any, SimpleNamespace(at=lambda step, _: steps.append(step))), held)
    supervisor = Supervisor()
    running = cast(Any, supervisor)
    await link.take_control_if_adopting(running)
    assert supervisor.told == []
    link.adopted.clear()
    for _ in range(3):
        await link.take_control_if_adopting(running)
    assert supervisor.told == [("hold", 3)]
    monkeypatch.setattr(supervisor_link, "ACK_SECONDS", -1.0)
    link.on_event({"event": "ack", "ok": True, "token": 2, "verb": "hold"})
    await link.take_control_if_adopting(running)
    assert (supervisor.told, link.adopted.is_set(), steps) == ([("hold", 3)] * 2, False, [])
    link.on_event({"event": "ack", "ok": True, "token": 3, "verb": "hold"})
    await link.take_control_if_adopting(running)
    assert (supervisor.told, link.adopted.is_set(), steps) == ([("hold", 3)] * 2, True, ["adopted"])


async def test_adopter_that_lost_its_lease_tells_the_supervisor_nothing() -> None:
    (held,) = HeldLeases(60.0).take([lease(3)], boottime())
    link = SupervisorLink(cast(Any, SimpleNamespace()), held)
    link.adopted.clear()
    held.lose()
    supervisor = Supervisor()
    with pytest.raises(LeaseLost):
        await link.take_control_if_adopting(cast(Any, supervisor))
    assert supervisor.told == []
