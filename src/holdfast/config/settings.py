"""All settings of a holdfast process, with their defaults, and what follows from them."""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from holdfast.config.checks import contradictions
from holdfast.config.values import (
    OnDisconnect,
    Pooler,
    Switch,
    optional,
    parse_bytes,
    parse_flag,
    parse_number,
    parse_on_disconnect,
    parse_path,
    parse_pooler,
    parse_port,
    parse_size,
    parse_switch,
    parse_text,
    parse_uid_range,
    parse_whole,
)
from holdfast.errors import ConfigError
from holdfast.limits import SETTINGS, AttemptLimits, LimitSettings
from holdfast.model import Policy, RetryPolicy
from holdfast.privileges import Ceiling, Ceilings
from holdfast.registry import runners
from holdfast.spec_checks import memory_bytes


def _setting(default: Any, parse: Callable[[object], Any], about: str) -> Any:
    return dataclasses.field(default=default, metadata={"parse": parse, "about": about})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a holdfast process. Each has the environment twin `HOLDFAST_` + its name in capitals."""

    database_url: str | None = _setting(
        None, optional(parse_text), "sqlite:///path or postgresql://…; else DATABASE_URL"
    )
    schema: str = _setting("holdfast", parse_text, "the schema that holds the tables on Postgres")
    data_dir: Path = _setting(Path("holdfast-data"), parse_path, "the folder that all parts share")
    state_dir: Path | None = _setting(None, optional(parse_path), "attempts and locks, on a local disk")
    shared_dir: Path | None = _setting(
        None, optional(parse_path), "inputs, artifacts and snapshots, the same on every host"
    )
    secrets_dir: Path | None = _setting(None, optional(parse_path), "a folder with one file per secret, named like it")
    process_user: str | None = _setting(
        None,
        optional(parse_text),
        "as root: one user for all processes (name, uid or uid:gid); none: a uid per attempt",
    )
    process_uids: str = _setting(
        "2100000000-2100065535", parse_uid_range, "as root: the range of uids, one for each attempt"
    )
    process_uids_dir: Path = _setting(
        Path("/var/lib/holdfast/uids"), parse_path, "the uids in use, one folder for all installations on this host"
    )
    process_memory: int | None = _setting(
        4 * 1024**3, optional(parse_bytes), "default memory of each process of an attempt on the host, such as 4g"
    )
    process_memory_max: int | None = _setting(
        None, optional(parse_bytes), "most memory per process that a job on the host may ask for"
    )
    process_pids: int | None = _setting(
        1024, optional(parse_whole), "default processes and threads of an attempt on the host; as root only"
    )
    process_pids_max: int | None = _setting(
        None, optional(parse_whole), "most processes and threads that a job on the host may ask for"
    )
    file_size: int | None = _setting(
        10 * 1024**3, optional(parse_bytes), "default size limit of one file of a process or container, such as 10g"
    )
    file_size_max: int | None = _setting(None, optional(parse_bytes), "largest file size limit that a job may ask for")
    folder_size: int | None = _setting(
        10 * 1024**3, optional(parse_bytes), "default size limit of an attempt's folder: work, output and log"
    )
    folder_size_max: int | None = _setting(
        None, optional(parse_bytes), "largest folder size limit that a job may ask for"
    )
    docker_host: str | None = _setting(
        "unix:///var/run/docker.sock",
        optional(parse_text),
        "the Docker engine: unix:///path or tcp://host:port; or none",
    )
    docker_memory: str = _setting("1g", parse_size, "default memory of a container")
    docker_cpus: float = _setting(1.0, parse_number, "default processors of a container")
    docker_pids: int = _setting(256, parse_whole, "default limit on the processes of a container")
    docker_memory_max: str | None = _setting(
        None, optional(parse_size), "most memory that non-admin callers may ask for; none: HOLDFAST_DOCKER_MEMORY"
    )
    docker_cpus_max: float | None = _setting(
        None, optional(parse_number), "most processors that non-admin callers may ask for; none: HOLDFAST_DOCKER_CPUS"
    )
    docker_pids_max: int | None = _setting(
        None, optional(parse_whole), "most processes that non-admin callers may ask for; none: HOLDFAST_DOCKER_PIDS"
    )
    allow_root_jobs: bool = _setting(
        False,
        parse_flag,
        "let jobs of admins and tools run as root (uid or gid 0); set it for the server and the workers",
    )
    lease_ttl: float = _setting(60.0, parse_number, "seconds that a lease lasts without a heartbeat")
    heartbeat_interval: float = _setting(15.0, parse_number, "seconds between heartbeats; at most a third of the lease")
    reaper_interval: float = _setting(15.0, parse_number, "seconds between checks for expired leases")
    poll_interval: float = _setting(1.0, parse_number, "seconds between polls for work when no notification arrives")
    orphan_grace: float = _setting(300.0, parse_number, "seconds that an orphan waits for a worker that can reach it")
    drain_grace: float = _setting(20.0, parse_number, "seconds that functions may still run when a worker stops")
    stop_grace: float = _setting(5.0, parse_number, "default seconds between the polite signal and SIGKILL of a job")
    max_attempts: int = _setting(1, parse_whole, "default attempts of a job, set when it is submitted")
    backoff_base: float = _setting(5.0, parse_number, "default seconds before the first retry of a job")
    backoff_cap: float = _setting(300.0, parse_number, "default maximum of seconds before a retry of a job")
    timeout: float | None = _setting(None, optional(parse_number), "default seconds that an attempt may take")
    log_max_bytes: int = _setting(10 * 1024 * 1024, parse_whole, "bytes of log that are kept for one job")
    artifact_max_bytes: int = _setting(1024**3, parse_whole, "bytes of artifacts that are kept for one attempt")
    outputs_timeout: float = _setting(
        3600.0, parse_number, "seconds that the output of an attempt waits for disk space before the job fails"
    )
    disk_reserve: int | None = _setting(
        256 * 1024**2,
        optional(parse_bytes),
        "free bytes, such as 256m, below which a disk accepts no data and no job starts; none: no reserve",
    )
    snapshots_max_bytes: int | None = _setting(None, optional(parse_whole), "bytes that all snapshots together may use")
    retention_days: float = _setting(30.0, parse_number, "days after which ended jobs are removed")
    audit_days: float = _setting(365.0, parse_number, "days after which rows of the audit trail are removed")
    keep_identical: int | None = _setting(None, optional(parse_whole), "ended jobs of one signature that are kept")
    listen: bool = _setting(True, parse_flag, "notifications through LISTEN and NOTIFY; off: polling only")
    pooler: Pooler = _setting(
        "none", parse_pooler, "transaction, if the URL leads to a pooler in that mode, such as PgBouncer"
    )
    listen_url: str | None = _setting(
        None, optional(parse_text), "the URL of Postgres itself, for LISTEN past a pooler"
    )

    host: str = _setting("127.0.0.1", parse_text, "the address that the service listens on")
    port: int = _setting(7070, parse_port, "the port that the service listens on; 0 takes a free one")
    auth: Switch = _setting("on", parse_switch, "off: no tokens, and loopback only")
    auth_off_as_root: bool = _setting(
        False,
        parse_flag,
        "allow HOLDFAST_AUTH=off as root, although every job can then become root through the service",
    )
    allow_raw: bool = _setting(False, parse_flag, "let non-admin callers submit commands and images of their own")
    tools: Path | None = _setting(None, optional(parse_path), "the TOML file of the tools that callers may use")
    max_body_bytes: int = _setting(16 * 1024 * 1024, parse_whole, "maximum bytes of a request's body")
    upload_max_bytes: int = _setting(
        100 * 1024 * 1024, parse_whole, "bytes of one upload, and of all uploads of one job"
    )
    stream_stall: float = _setting(
        60.0, parse_number, "seconds after which a client that reads nothing from its stream is disconnected"
    )
    max_connections: int = _setting(
        8000, parse_whole, "connections that the service keeps open at once; fewer if the process may open fewer files"
    )
    header_timeout: float = _setting(10.0, parse_number, "seconds in which the head of a request must arrive")
    streams_per_token: int = _setting(1000, parse_whole, "streams that one token may have open on one server")
    max_json_depth: int = _setting(64, parse_whole, "maximum nesting depth of JSON in a request")
    queue_enabled: bool = _setting(True, parse_flag, "off: the server runs jobs in the request that submits them")
    max_concurrency: int = _setting(1, parse_whole, "maximum number of jobs that a server without a queue runs at once")
    on_disconnect: OnDisconnect = _setting(
        "continue", parse_on_disconnect, "continue or cancel such a job when its client disconnects"
    )
    rate_limit: float | None = _setting(1000.0, optional(parse_number), "requests per second and token; none: no limit")
    auth_failures: float | None = _setting(
        10.0, optional(parse_number), "requests with an unknown token, per second and address; none: no limit"
    )
    api_connections: int = _setting(8, parse_whole, "connections to Postgres that the service keeps open")

    def __post_init__(self) -> None:
        problems = contradictions(self)
        if problems:
            raise ConfigError(problems)

    @property
    def url(self) -> str:
        """The database's URL: the one that is set, else SQLite in the data folder."""
        return self.database_url or f"sqlite:///{self.data_dir.absolute() / 'holdfast.db'}"

    @property
    def sqlite_file(self) -> Path | None:
        """The file of the database; None on Postgres."""
        if urlsplit(self.url).scheme != "sqlite":
            return None
        return Path(unquote(self.url.removeprefix("sqlite://")[1:])).absolute()

    @property
    def shared(self) -> Path:
        """The shared folder: the one that is set, else in the data folder."""
        return (self.shared_dir or self.data_dir / "shared").absolute()

    @property
    def uid_range(self) -> tuple[int, int]:
        """The first and the last uid that attempts can have."""
        first, _, last = self.process_uids.partition("-")
        return int(first), int(last)

    @property
    def job_defaults(self) -> dict[str, Any]:
        """Values for fields that a submit leaves out, where they differ from the built-in ones."""
        found: dict[str, Any] = {}
        if self.max_attempts != 1:
            found["max_attempts"] = self.max_attempts
        if (self.backoff_base, self.backoff_cap) != (RetryPolicy().base, RetryPolicy().cap):
            found["retry"] = {"base": self.backoff_base, "cap": self.backoff_cap}
        if self.stop_grace != Policy().stop_grace:
            found["stop_grace"] = self.stop_grace
        return found

    @property
    def ceilings(self) -> Ceilings:
        """The limits of what jobs of non-admin callers may ask for."""
        memory = memory_bytes(self.docker_memory_max or self.docker_memory)
        return {
            ("docker", "memory"): Ceiling(memory or 0, "HOLDFAST_DOCKER_MEMORY_MAX"),
            ("docker", "cpus"): Ceiling(self.docker_cpus_max or self.docker_cpus, "HOLDFAST_DOCKER_CPUS_MAX"),
            ("docker", "pids"): Ceiling(self.docker_pids_max or self.docker_pids, "HOLDFAST_DOCKER_PIDS_MAX"),
            **{(one.name, name): self._ceiling(name) for one in runners().values() for name in one.limits},
        }

    def _ceiling(self, name: str) -> Ceiling:
        """Return the ceiling of a limit, else its default; without either, any request only lowers the limit."""
        limits = self.attempt_limits
        most = getattr(limits.most, name) or getattr(limits.default, name)
        return Ceiling(math.inf if most is None else most, f"{SETTINGS[name]}_MAX")

    @property
    def attempt_limits(self) -> LimitSettings:
        """The limits of attempts, and their ceilings."""
        return LimitSettings(
            default=AttemptLimits(
                memory=self.process_memory,
                pids=self.process_pids,
                file_size=self.file_size,
                folder_size=self.folder_size,
            ),
            most=AttemptLimits(
                memory=self.process_memory_max,
                pids=self.process_pids_max,
                file_size=self.file_size_max,
                folder_size=self.folder_size_max,
            ),
        )

    @property
    def admin_token(self) -> Path:
        """The file of the first admin token."""
        return self.data_dir / "admin.token"

    @property
    def state(self) -> Path:
        """The state folder: the one that is set, else in the data folder."""
        return (self.state_dir or self.data_dir / "state").absolute()
