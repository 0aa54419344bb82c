"""Connectors: how tasks run, and when a workspace is quiet, so that it can be copied.

base.py      the interface of a connector, and what several of them need
files.py     plain files: nothing runs between tasks
postgres.py  a server in the workspace, stopped before it is copied
"""

from functools import cache

from holdfast.pipeline.connectors.base import Connector, WorkspaceNotConsistent
from holdfast.registry import attribute, connector_named

__all__ = ["Connector", "WorkspaceNotConsistent", "connector_of"]


@cache
def connector_of(name: str) -> Connector:
    """Return a connector of the registry; raise Invalid if there is none of this name."""
    made: Connector = attribute(connector_named(name).build)()
    return made
