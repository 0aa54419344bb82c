"""The leases that a worker holds in memory."""

from holdfast.model import Lease, StopKind, StopPhase, StopRequest
from holdfast.worker.held_leases import HeldLeases, boottime


def lease(token: int) -> Lease:
    return Lease("job", token, 1, "host", "default", "default", "process", None, "run", 0, 1, "{}", "{}")


def test_second_adoption_replaces_the_older_lease() -> None:
    """A worker that slept may adopt its own job: what it did for it before has lost its lease. Proves L6."""
    leases = HeldLeases(60.0)
    (old,) = leases.take([lease(1)], boottime())
    (new,) = leases.take([lease(3)], boottime())
    assert (old.lost, new.lost) == (True, False)
    leases.drop(old)
    assert leases.get("job") is new


def test_stop_request_only_escalates() -> None:
    """A late answer to an older question takes nothing back. Proves C1."""
    (held_lease,) = HeldLeases(60.0).take([lease(1)], boottime())
    for kind in (StopKind.INTERRUPT, StopKind.CANCEL, StopKind.INTERRUPT):
        held_lease.receive_stop(StopRequest(kind=kind, phase=StopPhase.REQUESTED))
    assert held_lease.stop is not None
    assert held_lease.stop.kind is StopKind.CANCEL


def test_lease_is_trusted_from_its_request_and_not_until_its_expiry() -> None:
    """Proves L7."""
    leases = HeldLeases(10.0)
    (held_lease,) = leases.take([lease(1)], boottime() - 8.9)
    assert held_lease.trusted
    (late,) = leases.take([lease(2)], boottime() - 9.1)
    before = late.trusted
    leases.renewed([late], boottime())
    after = late.trusted
    late.lose()
    assert [before, after, late.trusted] == [False, True, False]
