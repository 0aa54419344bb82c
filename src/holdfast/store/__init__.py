"""The store: the only place that knows SQL.

Operations are written once, in Python, over named statements; each dialect has its own text for them in `sql/`.
`open_store` returns a `Store`, whose parts are named after their subject: `jobs` for callers, `leases` for workers, and
so on.
"""

from holdfast.store.store import Store, open_store

__all__ = ["Store", "open_store"]
