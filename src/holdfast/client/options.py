"""What every job can be submitted with, whatever it runs: the options of builders and of `with_options`."""

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from os import PathLike
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypedDict

from holdfast.errors import Invalid
from holdfast.model import OnLost

if TYPE_CHECKING:
    from holdfast.client.builders import Builder
    from holdfast.client.job import Job
    from holdfast.client.sync_job import SyncJob

FileSource = str | PathLike[str] | bytes | IO[bytes]
"""A file for a job: a path, its content, or an open file, which is read from where it stands."""
Files = Sequence[FileSource] | Mapping[str, FileSource]
"""Files for a job: a list, each under its own name, or a mapping from the names that the job sees."""
NAMED_NEEDS = "have names here, and this version stores none: give a list of jobs"


@dataclass(frozen=True, kw_only=True)
class Retry:
    """When another attempt follows a failed one, and after how long; `max_attempts` says how many there may be.

    `on` is `failed`, `timed_out` or both. The waits are `base` seconds, twice that, and so on up to `cap`; left out,
    the settings apply. `exceptions` are for the decorator of a function: only these are retried.

        Retry(on=["failed", "timed_out"], base=1, cap=60)
        Retry(exceptions=(ConnectionError, TimeoutError))
    """

    on: Sequence[Literal["failed", "timed_out"]] = ("failed",)
    base: float | None = None
    cap: float | None = None
    exceptions: tuple[type[BaseException], ...] = ()

    def fields(self) -> dict[str, Any]:
        """Return it as a submission has it."""
        waits = {"base": self.base, "cap": self.cap}
        return {"on": list(self.on), **{name: value for name, value in waits.items() if value is not None}}


class Check(TypedDict):
    """A readiness check: a command that must succeed before the job starts, and the seconds that it may take."""

    command: Sequence[str]
    timeout: float


class JobOptions(TypedDict, total=False):
    """The options of a job. What is left out comes from the function's decorator, then from the settings.

    `needs` are ids or handles of jobs that must succeed first; inside one `submit_many`, also its other builders.
    `delay` is in seconds, by this process's clock. `key` is an idempotency key, for 24 hours. `reuse_key` returns the
    live or last successful job of that key instead of a new one; `rebuild` makes a new one unless one is live.
    """

    id: str
    kind: str
    queue: str
    lane: str
    priority: int
    labels: Mapping[str, str]
    needs: "Sequence[str | Job[Any] | SyncJob[Any] | Builder] | Mapping[str, str | Job[Any] | SyncJob[Any] | Builder]"
    hold: bool
    delay: float
    available_at: datetime
    max_attempts: int
    retry: "Retry | Mapping[str, Any]"
    on_lost: OnLost
    timeout: float
    queue_timeout: float
    idle_timeout: float
    stop_grace: float
    stop_after: float
    budget: Mapping[str, float]
    secrets: Sequence[str]
    check: Check
    reuse_key: str
    rebuild: bool
    key: str


OPTIONS = frozenset(JobOptions.__annotations__)


def checked(options: JobOptions) -> JobOptions:
    """Refuse options that do not exist or exclude each other. The rest is checked with the submit."""
    for name in options:
        if name not in OPTIONS:
            raise Invalid(name, f"is not an option of a job; those are {', '.join(sorted(OPTIONS))}")
    if "delay" in options and "available_at" in options:
        raise Invalid("delay", "is given together with available_at: give one of them")
    return options


def option_fields(options: JobOptions) -> dict[str, Any]:
    """Return options as fields of a submission, without `needs` and `key`, which concern the whole call."""
    fields: dict[str, Any] = {
        name: value for name, value in options.items() if value is not None and name not in ("needs", "key", "delay")
    }
    if isinstance(retry := fields.get("retry"), Retry):
        if retry.exceptions:
            raise Invalid("retry", "exceptions are for the decorator: only the worker that runs a function knows them")
        fields["retry"] = retry.fields()
    if (delay := options.get("delay")) is not None:
        if not delay >= 0:
            raise Invalid("delay", f"{delay!r} is not a number of seconds, at least 0")
        fields["available_at"] = datetime.now(UTC) + timedelta(seconds=delay)
    return fields


def needs_of(options: JobOptions) -> Sequence[Any]:
    """Return the needs as a list. Names are refused until a store can keep them."""
    needs = options.get("needs") or ()
    if isinstance(needs, Mapping):
        raise Invalid("needs", NAMED_NEEDS)
    if isinstance(needs, str) or not isinstance(needs, Sequence):
        raise Invalid("needs", "is not a list; put a single job into one")
    return needs


def opened(files: Files, stack: ExitStack) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield the name and the open content of each file; the stack closes what was opened here."""
    if isinstance(files, str | bytes | PathLike):
        raise Invalid("files", "is not a list or a mapping; put a single file into a list")
    named = files.items() if isinstance(files, Mapping) else ((_own_name(file), file) for file in files)
    for name, source in named:
        if isinstance(source, bytes):
            yield name, io.BytesIO(source)
        elif isinstance(source, str | PathLike):
            yield name, stack.enter_context(_open(Path(source)))
        elif hasattr(source, "read"):
            yield name, source
        else:
            raise Invalid("files", f"{name}: {type(source).__name__} is not a path, bytes or a file opened for bytes")


def _open(path: Path) -> IO[bytes]:
    try:
        return path.open("rb")
    except OSError as error:
        raise Invalid("files", f"{path} cannot be read: {error.strerror}") from error


def _own_name(file: Any) -> str:
    """Return the name of a file in a list: the last part of its path."""
    path = file if isinstance(file, str | PathLike) else getattr(file, "name", None)
    if not isinstance(path, str | PathLike):
        raise Invalid("files", 'one has no name: give a mapping, such as {"data.csv": content}')
    return Path(path).name
