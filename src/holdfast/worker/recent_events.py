"""The last events of an attempt, for a worker that adopted it: what the previous owner already reported."""

from collections.abc import Sequence

from holdfast.model import Event, Lease, Status
from holdfast.store import Store
from holdfast.worker.batch_writer import with_retries

MOST = 1000
"""Events that are read, at most."""


async def recent_events(store: Store, lease: Lease) -> Sequence[Event]:
    """Return the last events of the lease's attempt, oldest first."""
    heads = await with_retries(lambda: store.events.heads([lease.id]), "reading the end of a history")
    if lease.id not in heads:
        return ()
    after = max(0, heads[lease.id].seq - MOST)
    page = await with_retries(
        lambda: store.events.page(lease.id, tenant=lease.tenant, after=after, limit=MOST), "reading recent events"
    )
    claimed = [n for n, event in enumerate(page.items) if _is_claim(event)]
    return page.items[claimed[-1] + 1 :] if claimed else page.items


def _is_claim(event: Event) -> bool:
    return event.type == "status" and event.data.get("status") == Status.RUNNING
