"""The store: the only place that knows SQL.

Operations are written once, in Python, over named statements; each dialect has its own text for them in `sql/`. `open`
gives a `Store`; its parts are `jobs` (for callers), `leases` (for workers), `gates`, `lanes`, `queues`, `events`,
`workers` and `notifications`.
"""

from holdfast.store.store import Store, open_store

__all__ = ["Store", "open_store"]
