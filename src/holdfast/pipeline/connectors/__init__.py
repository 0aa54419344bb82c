"""What makes a workspace quiet, so that it can be copied: `files`, and `postgres`, which has a server beside the tasks.

base.py      what a connector answers
files.py     nothing runs between tasks, and that is all there is to it
postgres.py  a server in the workspace, stopped before it is copied
"""

from collections.abc import Mapping

from holdfast.pipeline.connectors.base import Connector, NotQuiet
from holdfast.pipeline.connectors.files import Files
from holdfast.pipeline.connectors.postgres import Postgres
from holdfast.tasks import Connector as Name

__all__ = ["CONNECTORS", "Connector", "NotQuiet"]

CONNECTORS: Mapping[Name, Connector] = {"files": Files(), "postgres": Postgres()}
