"""Connectors: how tasks run, and when a workspace is quiet, so that it can be copied.

base.py      the interface of a connector
files.py     plain files: nothing runs between tasks
postgres.py  a server in the workspace, stopped before it is copied
"""

from collections.abc import Mapping

from holdfast.pipeline.connectors.base import Connector, WorkspaceNotConsistent
from holdfast.pipeline.connectors.files import FilesConnector
from holdfast.pipeline.connectors.postgres import PostgresConnector
from holdfast.pipeline_spec import ConnectorName

__all__ = ["CONNECTORS", "Connector", "WorkspaceNotConsistent"]

CONNECTORS: Mapping[ConnectorName, Connector] = {"files": FilesConnector(), "postgres": PostgresConnector()}
