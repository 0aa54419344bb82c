"""What an adapter says about a peer; the adapters are the files of `adapters/`, one per peer."""

from dataclasses import dataclass
from enum import StrEnum


class Runtime(StrEnum):
    OURS = "ours"
    """The project's own environment."""
    PYTHON = "python"
    NEWER_PYTHON = "newer python"
    NODE = "node"


class Keeper(StrEnum):
    """Where a peer keeps its jobs."""

    POSTGRES = "Postgres"
    SQLITE = "SQLite"
    REDIS = "Redis"


@dataclass(frozen=True)
class Record:
    """Something that the peer keeps of each job: what, the query that counts it, and how many per job."""

    what: str
    query: str
    per_job: int = 1


@dataclass(frozen=True)
class Crowd:
    """How a million jobs are made from one: the table, its key and how to draw a new one."""

    table: str
    key: str
    new_key: str
    then: tuple[str, ...] = ()
    """Statements for jobs in blocked lanes; `{count}` is how many."""


@dataclass(frozen=True)
class Peer:
    name: str
    runtime: Runtime
    keeper: Keeper
    program: str
    """The name of its file in `programs/` or `node/`."""
    packages: tuple[str, ...]
    """Those whose versions the page names."""
    configuration: str
    keeps: str
    """What it keeps of a job that succeeded, in words."""
    ended: str
    """The query for the number of jobs that ended. `{mark}` is what `mark` answered before the jobs were submitted."""
    records: tuple[Record, ...] = ()
    ended_counts_left: bool = False
    """The query counts the jobs that are left, because those that ended are deleted."""
    mark: str = "SELECT 0"
    registered: str | None = None
    """The query for the number of workers that are up, where the program cannot say that it is ready."""
    crowd: Crowd | None = None
    no_crowd: str = ""
    """Why it is not measured among a million future jobs."""
    lanes: bool = False
    share: float = 1.0
    """The share of the jobs that it gets in a drain: slow peers get a tenth."""
    pinned: bool = True
    """Whether an old transaction means anything to it."""
    reference: bool = False
    """It is a yardstick, not a peer."""
