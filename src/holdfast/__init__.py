"""holdfast: a durable execution queue and worker runtime. Your database is the queue; your jobs outlive your workers.

General layout: `model`, `errors`, `timing` and `submission` are plain values; `store` is the only place that knows SQL;
`duties` are the periodic chores; `api` is the service; `cli` is the command
line. Data flows one way, and imports point down only.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.assemble import asgi
    from holdfast.store.inside import submit_inside, submit_inside_async

__version__ = "0.1.0"
__all__ = ["asgi", "submit_inside", "submit_inside_async"]


def __getattr__(name: str) -> Any:
    """Import the public names when they are asked for, so that `import holdfast` costs nothing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "asgi":
        from holdfast import assemble  # noqa: PLC0415

        return assemble.asgi
    from holdfast.store import inside  # noqa: PLC0415

    return getattr(inside, name)
