"""The registry of runners and connectors: the built-in ones, and those of installed distributions.

A built-in runner or connector is one line here. Others come from the entry points `holdfast.runners` and
`holdfast.connectors`. Both name a descriptor (`descriptors.py`), so nothing here imports what runs attempts. They are
loaded once per process; `load_plugins` does so at the edge, where a broken distribution is reported before anything
starts.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from holdfast.descriptors import ConnectorDescriptor, RunnerDescriptor
from holdfast.errors import ConfigError, Invalid, one_line

BUILT_IN_RUNNERS = (
    "holdfast.runner.function_descriptor:FUNCTION",
    "holdfast.runner.process_descriptor:PROCESS",
    "holdfast.runner.docker.descriptor:DOCKER",
)
BUILT_IN_CONNECTORS = (
    ConnectorDescriptor(name="files", version="1", build="holdfast.pipeline.connectors.files:FilesConnector"),
    ConnectorDescriptor(
        name="postgres", version="1", build="holdfast.pipeline.connectors.postgres:PostgresConnector", sql=True
    ),
)
RUNNERS, CONNECTORS = "holdfast.runners", "holdfast.connectors"
"""The groups of entry points."""
NAME = re.compile(r"[a-z][a-z0-9_-]{0,62}", re.ASCII)
"""What a runner or connector can be called; the database accepts no other runner."""
MOST_MESSAGE = 300

Descriptor = TypeVar("Descriptor", RunnerDescriptor, ConnectorDescriptor)


def load_plugins() -> None:
    """Load everything now, and raise ConfigError with a line for each distribution that is broken."""
    problems: list[str] = []
    for load in (runners, connectors):
        try:
            load()
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)


@cache
def runners() -> Mapping[str, RunnerDescriptor]:
    """Return all runners by name."""
    built_in = [attribute(where) for where in BUILT_IN_RUNNERS]
    return loaded(RunnerDescriptor, built_in, entry_points(group=RUNNERS), _runner_problem)


@cache
def connectors() -> Mapping[str, ConnectorDescriptor]:
    """Return all connectors by name."""
    return loaded(ConnectorDescriptor, BUILT_IN_CONNECTORS, entry_points(group=CONNECTORS), _connector_problem)


def runner_named(name: str) -> RunnerDescriptor:
    """Return the descriptor of a runner; raise Invalid with the known names for an unknown one."""
    found = runners().get(name)
    if found is None:
        raise Invalid("runner", f"{name[:60]!r} is not a runner here; known are {', '.join(runners())}")
    return found


def connector_named(name: str) -> ConnectorDescriptor:
    """Return the descriptor of a connector; raise Invalid with the known names for an unknown one."""
    found = connectors().get(name)
    if found is None:
        raise Invalid("connector", f"{name[:60]!r} is not a connector here; known are {', '.join(connectors())}")
    return found


def loaded(
    kind: type[Descriptor],
    built_in: Iterable[Descriptor],
    entries: Iterable[EntryPoint],
    problem_of: Callable[[Descriptor], str | None],
) -> Mapping[str, Descriptor]:
    """Return the built-in descriptors and those of the entry points. Raise ConfigError with a line per broken one."""
    found: dict[str, Descriptor] = {descriptor.name: descriptor for descriptor in built_in}
    owners = dict.fromkeys(found, "holdfast itself")
    problems: list[str] = []
    for entry in sorted(entries, key=lambda entry: (entry.name, _distribution(entry))):
        try:
            descriptor = _described(entry, kind, problem_of)
            if entry.name in owners:
                raise ValueError(f"the name is used by {owners[entry.name]}")
        except Exception as error:  # A module of another distribution may raise anything.
            problems.append(_line(entry, error))
            continue
        found[entry.name] = descriptor
        owners[entry.name] = _distribution(entry)
    if problems:
        raise ConfigError(problems)
    return found


def attribute(where: str) -> Any:
    """Import `module:attribute`."""
    module, _, name = where.partition(":")
    return getattr(importlib.import_module(module), name)


def _described(entry: EntryPoint, kind: type[Descriptor], problem_of: Callable[[Descriptor], str | None]) -> Descriptor:
    found = entry.load()
    if not isinstance(found, kind):
        raise TypeError(f"{entry.value} is a {type(found).__name__}, not a {kind.__name__}")
    if found.name != entry.name:
        raise ValueError(f"{entry.value} describes {found.name!r}: the entry point must have the same name")
    if not NAME.fullmatch(found.name):
        raise ValueError("a name has lower-case letters, digits, - and _, begins with a letter, and has at most 63")
    if (problem := problem_of(found)) is not None:
        raise ValueError(problem)
    return found


def _runner_problem(descriptor: RunnerDescriptor) -> str | None:
    """Return what is wrong with the descriptor of a plug-in; None if it can be used."""
    kinds = (descriptor.spec, *(() if descriptor.pipeline is None else (descriptor.pipeline,)))
    if any(not kind.__struct_config__.forbid_unknown_fields for kind in kinds):
        return "its spec must refuse unknown fields: give the struct forbid_unknown_fields=True"
    if unknown := descriptor.open_fields - descriptor.fields:
        return f"open_fields names {', '.join(sorted(unknown))}, which its spec does not have"
    if descriptor.build is None or descriptor.named_by is not None:
        return "build must be given and named_by left out: only functions run in the worker itself, each by its name"
    return None


def _connector_problem(descriptor: ConnectorDescriptor) -> str | None:
    return None


def _line(entry: EntryPoint, error: Exception) -> str:
    kind = "runner" if entry.group == RUNNERS else "connector"
    why = one_line(f"{type(error).__name__}: {error}", MOST_MESSAGE)
    owner = entry.dist.name if entry.dist is not None else entry.value
    return f"{kind} {entry.name} of {_distribution(entry)} cannot be loaded ({why}): repair it or uninstall {owner}"


def _distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.value
