"""Reserves space in the SQLite file while its disk has some, for writes that must succeed on a full disk."""

from holdfast.runner.disk import DATABASE, Disks
from holdfast.store import Store

EVERY = 5.0


async def run_once(store: Store, disks: Disks) -> None:
    """Refill the reserved space, unless the disk is below its reserve: then the rest is for more important writes."""
    if disks.reserve is not None and DATABASE not in await disks.look():
        await store.make_room()
