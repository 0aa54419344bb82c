"""Settings: defaults < file < environment < flags, built once at the edge, with all problems reported at once."""

import dataclasses
import ipaddress
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from holdfast.errors import ConfigError
from holdfast.limits import FILES, NAMES, SETTINGS, AttemptLimits, LimitSettings
from holdfast.model import Policy, RetryPolicy
from holdfast.privileges import Ceiling, Ceilings
from holdfast.spec_checks import UNITS, memory_bytes

PREFIX = "HOLDFAST_"
CONFIG_FILE = "HOLDFAST_CONFIG"
USUAL = {"DATABASE_URL", "DOCKER_HOST"}
"""Variables that platforms set for every program."""
MOST_DEPTH = 500
"""Databases and JSON parsers fail at depths of about a thousand."""

MOST_ATTEMPTS = 1000
MOST_UID = 2**32 - 2
"""The largest id of a user or group; one more means "none" to the kernel."""

Pooler = Literal["none", "transaction"]
"""What is between us and Postgres: nothing that matters to us, or a pooler in transaction mode."""

Switch = Literal["on", "off"]
OnDisconnect = Literal["continue", "cancel"]


def _number(text: object) -> float:
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise ValueError("is not a number")
    number = float(text)
    if not 0 < number < 1e12:
        raise ValueError("must be greater than 0")
    return number


def _whole(text: object) -> int:
    number = _number(text)
    if number != int(number):
        raise ValueError("must be a whole number")
    return int(number)


def _flag(text: object) -> bool:
    if isinstance(text, bool):
        return text
    match str(text).lower():
        case "true" | "1" | "yes" | "on":
            return True
        case "false" | "0" | "no" | "off":
            return False
    raise ValueError("must be true or false")


def _text(text: object) -> str:
    if not isinstance(text, str) or not text:
        raise ValueError("must be text")
    return text


def _path(text: object) -> Path:
    return Path(_text(str(text))).expanduser()


def _uid_range(text: object) -> str:
    found = re.fullmatch(r"([1-9][0-9]{0,9})-([1-9][0-9]{0,9})", str(text))
    if not found or not int(found[1]) <= int(found[2]) <= MOST_UID:
        raise ValueError(f"must be two uids, such as 2100000000-2100065535, from 1 to {MOST_UID}")
    return str(text)


def _size(text: object) -> str:
    if not re.fullmatch(r"[0-9]+[kmgKMG]?", str(text)):
        raise ValueError("must be a number of bytes, such as 512m or 1g")
    return str(text)


def _bytes(text: object) -> int:
    """Parse a number of bytes, also with a unit: 4096, 512m, 1g."""
    if isinstance(text, int) and not isinstance(text, bool):
        return _whole(text)
    size = _size(text)
    return _whole(int(size.rstrip("kmgKMG")) * UNITS.get(size[-1].lower(), 1))


def _pooler(text: object) -> Pooler:
    match text:
        case "none" | "transaction":
            return text
    raise ValueError("must be none or transaction")


def _switch(text: object) -> Switch:
    match text:
        case "on" | "off":
            return text
        case True:
            return "on"
        case False:
            return "off"
    raise ValueError("must be on or off")


def _on_disconnect(text: object) -> OnDisconnect:
    match text:
        case "continue" | "cancel":
            return text
    raise ValueError("must be continue or cancel")


def _port(text: object) -> int:
    try:
        port = int(str(text))
    except ValueError:
        port = -1
    if not 0 <= port <= 65_535:
        raise ValueError("must be a port, 0 to 65535")
    return port


def _optional(parse: Callable[[object], Any]) -> Callable[[object], Any]:
    return lambda text: None if text in (None, "", "none") else parse(text)


def _setting(default: Any, parse: Callable[[object], Any], about: str) -> Any:
    return dataclasses.field(default=default, metadata={"parse": parse, "about": about})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of a holdfast process. Each has the environment twin `HOLDFAST_` + its name in capitals."""

    database_url: str | None = _setting(None, _optional(_text), "sqlite:///path or postgresql://…; else DATABASE_URL")
    schema: str = _setting("holdfast", _text, "the schema that holds the tables on Postgres")
    data_dir: Path = _setting(Path("holdfast-data"), _path, "the folder that all parts share")
    state_dir: Path | None = _setting(None, _optional(_path), "attempts and locks, on a local disk")
    shared_dir: Path | None = _setting(
        None, _optional(_path), "inputs, artifacts and snapshots, the same on every host"
    )
    secrets_dir: Path | None = _setting(None, _optional(_path), "a folder with one file per secret, named like it")
    process_user: str | None = _setting(
        None, _optional(_text), "as root: one user for all processes (name, uid or uid:gid); none: a uid per attempt"
    )
    process_uids: str = _setting(
        "2100000000-2100065535", _uid_range, "as root: the range of uids, one for each attempt"
    )
    process_uids_dir: Path = _setting(
        Path("/var/lib/holdfast/uids"), _path, "the uids in use, one folder for all installations on this host"
    )
    process_memory: int | None = _setting(
        4 * 1024**3, _optional(_bytes), "default memory of each process of an attempt on the host, such as 4g"
    )
    process_memory_max: int | None = _setting(
        None, _optional(_bytes), "most memory per process that a job on the host may ask for"
    )
    process_pids: int | None = _setting(
        1024, _optional(_whole), "default processes and threads of an attempt on the host; as root only"
    )
    process_pids_max: int | None = _setting(
        None, _optional(_whole), "most processes and threads that a job on the host may ask for"
    )
    file_size: int | None = _setting(
        10 * 1024**3, _optional(_bytes), "default size limit of one file of a process or container, such as 10g"
    )
    file_size_max: int | None = _setting(None, _optional(_bytes), "largest file size limit that a job may ask for")
    folder_size: int | None = _setting(
        10 * 1024**3, _optional(_bytes), "default size limit of an attempt's folder: work, output and log"
    )
    folder_size_max: int | None = _setting(None, _optional(_bytes), "largest folder size limit that a job may ask for")
    docker_host: str | None = _setting(
        "unix:///var/run/docker.sock", _optional(_text), "the Docker engine: unix:///path or tcp://host:port; or none"
    )
    docker_memory: str = _setting("1g", _size, "default memory of a container")
    docker_cpus: float = _setting(1.0, _number, "default processors of a container")
    docker_pids: int = _setting(256, _whole, "default limit on the processes of a container")
    docker_memory_max: str | None = _setting(
        None, _optional(_size), "most memory that non-admin callers may ask for; none: HOLDFAST_DOCKER_MEMORY"
    )
    docker_cpus_max: float | None = _setting(
        None, _optional(_number), "most processors that non-admin callers may ask for; none: HOLDFAST_DOCKER_CPUS"
    )
    docker_pids_max: int | None = _setting(
        None, _optional(_whole), "most processes that non-admin callers may ask for; none: HOLDFAST_DOCKER_PIDS"
    )
    allow_root_jobs: bool = _setting(
        False, _flag, "let jobs of admins and tools run as root (uid or gid 0); set it for the server and the workers"
    )
    lease_ttl: float = _setting(60.0, _number, "seconds that a lease lasts without a heartbeat")
    heartbeat_interval: float = _setting(15.0, _number, "seconds between heartbeats; at most a third of the lease")
    reaper_interval: float = _setting(15.0, _number, "seconds between checks for expired leases")
    poll_interval: float = _setting(1.0, _number, "seconds between polls for work when no notification arrives")
    orphan_grace: float = _setting(300.0, _number, "seconds that an orphan waits for a worker that can reach it")
    drain_grace: float = _setting(20.0, _number, "seconds that functions may still run when a worker stops")
    stop_grace: float = _setting(5.0, _number, "default seconds between the polite signal and SIGKILL of a job")
    max_attempts: int = _setting(1, _whole, "default attempts of a job, set when it is submitted")
    backoff_base: float = _setting(5.0, _number, "default seconds before the first retry of a job")
    backoff_cap: float = _setting(300.0, _number, "default maximum of seconds before a retry of a job")
    timeout: float | None = _setting(None, _optional(_number), "default seconds that an attempt may take")
    log_max_bytes: int = _setting(10 * 1024 * 1024, _whole, "bytes of log that are kept for one job")
    artifact_max_bytes: int = _setting(1024**3, _whole, "bytes of artifacts that are kept for one attempt")
    outputs_timeout: float = _setting(
        3600.0, _number, "seconds that the output of an attempt waits for disk space before the job fails"
    )
    disk_reserve: int | None = _setting(
        256 * 1024**2,
        _optional(_bytes),
        "free bytes, such as 256m, below which a disk accepts no data and no job starts; none: no reserve",
    )
    snapshots_max_bytes: int | None = _setting(None, _optional(_whole), "bytes that all snapshots together may use")
    retention_days: float = _setting(30.0, _number, "days after which ended jobs are removed")
    audit_days: float = _setting(365.0, _number, "days after which rows of the audit trail are removed")
    keep_identical: int | None = _setting(None, _optional(_whole), "ended jobs of one signature that are kept")
    listen: bool = _setting(True, _flag, "notifications through LISTEN and NOTIFY; off: polling only")
    pooler: Pooler = _setting(
        "none", _pooler, "transaction, if the URL leads to a pooler in that mode, such as PgBouncer"
    )
    listen_url: str | None = _setting(None, _optional(_text), "the URL of Postgres itself, for LISTEN past a pooler")

    host: str = _setting("127.0.0.1", _text, "the address that the service listens on")
    port: int = _setting(7070, _port, "the port that the service listens on; 0 takes a free one")
    auth: Switch = _setting("on", _switch, "off: no tokens, and loopback only")
    auth_off_as_root: bool = _setting(
        False, _flag, "allow HOLDFAST_AUTH=off as root, although every job can then become root through the service"
    )
    allow_raw: bool = _setting(False, _flag, "let non-admin callers submit commands and images of their own")
    tools: Path | None = _setting(None, _optional(_path), "the TOML file of the tools that callers may use")
    max_body_bytes: int = _setting(16 * 1024 * 1024, _whole, "maximum bytes of a request's body")
    upload_max_bytes: int = _setting(100 * 1024 * 1024, _whole, "bytes of one upload, and of all uploads of one job")
    stream_stall: float = _setting(
        60.0, _number, "seconds after which a client that reads nothing from its stream is disconnected"
    )
    max_connections: int = _setting(
        8000, _whole, "connections that the service keeps open at once; fewer if the process may open fewer files"
    )
    header_timeout: float = _setting(10.0, _number, "seconds in which the head of a request must arrive")
    streams_per_token: int = _setting(1000, _whole, "streams that one token may have open on one server")
    max_json_depth: int = _setting(64, _whole, "maximum nesting depth of JSON in a request")
    queue_enabled: bool = _setting(True, _flag, "off: the server runs jobs in the request that submits them")
    max_concurrency: int = _setting(1, _whole, "maximum number of jobs that a server without a queue runs at once")
    on_disconnect: OnDisconnect = _setting(
        "continue", _on_disconnect, "continue or cancel such a job when its client disconnects"
    )
    rate_limit: float | None = _setting(1000.0, _optional(_number), "requests per second and token; none: no limit")
    auth_failures: float | None = _setting(
        10.0, _optional(_number), "requests with an unknown token, per second and address; none: no limit"
    )
    api_connections: int = _setting(8, _whole, "connections to Postgres that the service keeps open")

    def __post_init__(self) -> None:
        problems = _contradictions(self)
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
            **{("process", name): self._ceiling(name) for name in NAMES},
            **{("docker", name): self._ceiling(name) for name in FILES},
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


def loopback(host: str) -> bool:
    """Return whether an address can only be reached from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _malformed(settings: Settings) -> list[str]:
    """Return a problem for each database URL that cannot be parsed."""
    problems = []
    for name, url in (("HOLDFAST_DATABASE_URL", settings.database_url), ("HOLDFAST_LISTEN_URL", settings.listen_url)):
        try:
            _ = url and urlsplit(url).port
        except ValueError as error:
            problems.append(f"{name} is not a URL ({error}): use sqlite:///path or postgresql://host:port/name")
    return problems


def _open_to_strangers(settings: Settings) -> list[str]:
    """Return the problems of a service without tokens that others could reach."""
    problems = []
    if settings.auth == "off" and not loopback(settings.host):
        problems.append(
            f"HOLDFAST_AUTH is off and HOLDFAST_HOST is {settings.host}, which others may reach: "
            "turn it on, or listen on 127.0.0.1"
        )
    if settings.auth == "off" and os.geteuid() == 0 and not settings.auth_off_as_root:
        problems.append(
            "HOLDFAST_AUTH is off and this is root: every job on this machine could become root through the service. "
            "Run as another user, turn it on, or set HOLDFAST_AUTH_OFF_AS_ROOT=true if all jobs are trusted"
        )
    return problems


def _above_ceilings(settings: Settings) -> list[str]:
    """Return a problem for each default that is above its ceiling."""
    limits = settings.attempt_limits
    found = [(name, getattr(limits.default, name), getattr(limits.most, name)) for name in NAMES]
    return [
        f"{SETTINGS[name]} is {default}, more than {SETTINGS[name]}_MAX ({most}): lower it, or raise the ceiling"
        for name, default, most in found
        if default is not None and most is not None and default > most
    ]


def _contradictions(settings: Settings) -> list[str]:
    problems = _above_ceilings(settings)
    if settings.heartbeat_interval > settings.lease_ttl / 3:
        problems.append(
            f"HOLDFAST_HEARTBEAT_INTERVAL is {settings.heartbeat_interval:g} s; it may be at most a third of "
            f"HOLDFAST_LEASE_TTL ({settings.lease_ttl:g} s), that is {settings.lease_ttl / 3:g} s"
        )
    if settings.backoff_base > settings.backoff_cap:
        problems.append(
            f"HOLDFAST_BACKOFF_BASE is {settings.backoff_base:g} s, more than "
            f"HOLDFAST_BACKOFF_CAP ({settings.backoff_cap:g} s)"
        )
    if settings.max_attempts > MOST_ATTEMPTS:
        problems.append(f"HOLDFAST_MAX_ATTEMPTS is {settings.max_attempts}; at most {MOST_ATTEMPTS} are accepted")
    problems += _malformed(settings)
    if problems:
        return problems  # The checks below parse the URLs.
    if settings.database_url is not None:
        scheme = urlsplit(settings.database_url).scheme
        if scheme not in ("sqlite", "postgres", "postgresql"):
            problems.append(
                f"HOLDFAST_DATABASE_URL starts with {scheme or 'nothing'!r}: use sqlite:///path or postgresql://host/name"
            )
    if urlsplit(settings.url).scheme == "sqlite" and (settings.pooler != "none" or settings.listen_url):
        problems.append("HOLDFAST_POOLER and HOLDFAST_LISTEN_URL are for Postgres, and HOLDFAST_DATABASE_URL is not")
    if settings.listen_url is not None and urlsplit(settings.listen_url).scheme not in ("postgres", "postgresql"):
        problems.append("HOLDFAST_LISTEN_URL is not a URL of Postgres: use postgresql://host/name")
    if settings.pooler != "none" and settings.listen_url == settings.url:
        problems.append("HOLDFAST_LISTEN_URL leads to the pooler, where LISTEN does not work: use Postgres's own URL")
    if settings.docker_host is not None and not re.match(r"(unix:///|(tcp|http|https)://[^/])", settings.docker_host):
        problems.append(f"HOLDFAST_DOCKER_HOST is {settings.docker_host!r}: use unix:///path, tcp://host:port or none")
    problems += _open_to_strangers(settings)
    if settings.max_json_depth > MOST_DEPTH:
        problems.append(f"HOLDFAST_MAX_JSON_DEPTH is {settings.max_json_depth}; at most {MOST_DEPTH} can be kept")
    if not settings.schema.isidentifier() or len(settings.schema) > 60:
        problems.append(f"HOLDFAST_SCHEMA is {settings.schema!r}: use letters, digits and underscores")
    return problems


def load(
    flags: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Settings:
    """Build the settings from all four sources, or raise an error that lists every problem."""
    environment = os.environ if environment is None else environment
    problems: list[str] = []
    found: dict[str, tuple[str, object]] = {}
    fields = {field.name: field for field in dataclasses.fields(Settings)}

    source = file or (Path(environment[CONFIG_FILE]) if environment.get(CONFIG_FILE) else None)
    for name, value in _read_file(source, problems).items():
        if name in fields:
            found[name] = (f"{name} in {source}", value)
        else:
            problems.append(f"{name} in {source} is not a setting")
    found |= {name.lower(): (name, environment[name]) for name in USUAL if environment.get(name)}
    for name in fields:
        if environment.get(PREFIX + name.upper()):
            found[name] = (PREFIX + name.upper(), environment[PREFIX + name.upper()])
    for name, value in (flags or {}).items():
        if value is not None:
            found[name] = (f"--{name.replace('_', '-')}", value)

    values: dict[str, Any] = {}
    for name, (where, value) in found.items():
        try:
            values[name] = fields[name].metadata["parse"](value)
        except ValueError as error:
            problems.append(f"{where} is {value!r}: {error}")
    try:
        settings = Settings(**values)
    except ConfigError as error:
        problems.extend(error.problems)
    if problems:
        raise ConfigError(problems)
    return settings


def _read_file(path: Path | None, problems: list[str]) -> Mapping[str, object]:
    if path is None:
        return {}
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        problems.append(f"cannot read {path}: {error.strerror}")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        problems.append(f"{path} is not TOML: {error}")
    return {}
