"""Descriptors of runners and connectors: what the API, a submit and a worker know about one without importing it.

A descriptor is light: it names its machinery as `module:attribute`, which only a worker imports. `registry.py` has the
list of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from holdfast.pipeline_spec import PipelineSpec


@dataclass(frozen=True, kw_only=True)
class RunnerDescriptor:
    """One runner: what its jobs look like, who may submit them, and how a worker builds it.

    The defaults are the careful choice: only admins and tools may submit, and no field is for every caller.
    """

    name: str
    spec: type[msgspec.Struct]
    """The type of a job's spec; it refuses unknown fields."""
    build: str | None
    """`module:function`, an `async def (RunnerHost) -> Runner | None`; None: the worker itself runs such jobs."""
    pipeline: type[PipelineSpec] | None = None
    """The type of a pipeline's spec; None: the runner runs no pipelines."""
    privileged: bool = True
    """Whether a job needs an admin's token, a tool, or HOLDFAST_ALLOW_RAW."""
    open_fields: frozenset[str] = frozenset()
    """Fields of the spec that every caller who may submit such a job may set; the others are for admins and tools."""
    adoptable: bool = True
    """Whether an attempt outlives its worker, so that the next worker adopts it."""
    limits: tuple[str, ...] = ()
    """Limits of attempts that the runner enforces, of those in `limits.NAMES`: their settings apply to its jobs."""
    work_folder: bool = True
    """Whether an attempt has a work folder, into which uploads are copied."""
    host_users: bool = False
    """Whether the `user` of a spec is a user of the worker's host, as whom a readiness check can run."""
    named_by: str | None = None
    """The field of the spec that completes the capability, as in `function:resize`; else all jobs have the same."""

    def capability(self, spec: Mapping[str, Any]) -> str:
        """Return the capability that a worker needs for a job with this spec."""
        return self.name if self.named_by is None else f"{self.name}:{spec[self.named_by]}"

    @cached_property
    def fields(self) -> frozenset[str]:
        """The names of all fields of its specs, as callers write them."""
        kinds = (self.spec, *(() if self.pipeline is None else (self.pipeline,)))
        return frozenset(field for kind in kinds for field in kind.__struct_encode_fields__)


@dataclass(frozen=True, kw_only=True)
class ConnectorDescriptor:
    """One connector: how a worker builds it, and what a submit and a plan know about it."""

    name: str
    version: str
    """Part of the identity of every snapshot. Raise it when workspaces of the old version can no longer be used."""
    build: str
    """`module:attribute` of what returns the connector when it is called without arguments, such as its class."""
    sql: bool = False
    """Whether its tasks may be SQL files."""

    @property
    def identity(self) -> str:
        """The connector's part of a snapshot's identity."""
        return f"{self.name} {self.version}"
