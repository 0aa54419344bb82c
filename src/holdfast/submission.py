"""What a caller asks for, and the checks that need no database.

`parse` turns plain data into a `Submission`, or raises an error that names the field; `build_batch` makes a whole call
ready for a store.
"""

import hashlib
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import attrgetter
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from holdfast import decoding
from holdfast.dependency_order import in_order
from holdfast.errors import Invalid, TooLarge
from holdfast.function_defaults import FunctionDefaults, newer, of_job
from holdfast.model import FUNCTION, Check, OnLost, Policy, RetryPolicy, RunnerName, new_id
from holdfast.pipeline_spec import NO_UPLOADS, PIPELINE_FIELDS, ConnectorName, SnapshotMode, TaskSpec
from holdfast.registry import runner_named
from holdfast.runner_specs import Name, Seconds, capability_of, check_spec, invalid_field
from holdfast.spec_checks import check_names
from holdfast.timing import LONGEST

MAX_PAYLOAD = 1024 * 1024
MAX_BATCH = 10_000
MAX_KEY = 128
MOST_ARGUMENTS, MOST_ARGUMENT = 4096, 32_768
"""Arguments of a command, and characters of one."""
MOST_CHECK_SECONDS = 86_400.0
QUEUE = "default"
MAX_ATTEMPTS = 1
"""The built-in default."""
FIRST_YEAR, LAST_YEAR = 1970, 9000
"""The range of times that every database and time zone can represent."""


class Submission(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One job as a caller asks for it. What is left out (None, UNSET, empty) is filled in by defaults."""

    runner: RunnerName
    spec: dict[str, Any]
    id: str | None = None
    tenant: Name | None = None
    kind: Name = "run"
    queue: Name | None = None
    lane: Name | None = None
    priority: Annotated[int, Meta(ge=-1_000_000, le=1_000_000)] | UnsetType = UNSET
    labels: Annotated[dict[Name, Annotated[str, Meta(max_length=256)]], Meta(max_length=64)] = {}
    inputs: dict[str, Any] = {}
    needs: Annotated[tuple[str, ...], Meta(max_length=1000)] = ()
    hold: bool = False
    available_at: Annotated[datetime, Meta(tz=True)] | None = None
    max_attempts: Annotated[int, Meta(ge=1, le=1000)] | None = None
    retry: RetryPolicy | None = None
    on_lost: OnLost | UnsetType = UNSET
    timeout: Seconds | None = None
    queue_timeout: Seconds | None = None
    idle_timeout: Seconds | None = None
    stop_grace: Annotated[float, Meta(ge=0, le=86_400)] | None = None
    stop_after: Seconds | None = None
    budget: dict[Name, Annotated[float, Meta(ge=0)]] | None = None
    secrets: tuple[Name, ...] = ()
    uploads: Annotated[tuple[Name, ...], Meta(max_length=100)] = ()
    check: Check | None = None
    reuse_key: Name | None = None
    rebuild: bool = False
    tasks: tuple[TaskSpec, ...] = ()
    connector: ConnectorName | None = None
    snapshot: SnapshotMode | None = None
    base: str | None = None

    @property
    def capability(self) -> str:
        """The capability that a worker needs for the job."""
        return capability_of(self.runner, self.spec)

    @property
    def policy(self) -> dict[str, Any] | None:
        """The fields of the job's policy that differ from the defaults."""
        if _policy_of(self) == _NO_POLICY:
            return None
        fields: dict[str, Any] = msgspec.to_builtins(self)
        return {name: fields[name] for name in _POLICY if name in fields}


_POLICY = Policy.__struct_fields__
_policy_of = attrgetter(*_POLICY)
_pipeline_fields_of = attrgetter(*PIPELINE_FIELDS)
_NO_POLICY = _policy_of(Submission(runner="process", spec={}))


class Accepted(msgspec.Struct, frozen=True):
    """The answer to a submit: the job's id, and whether it existed already."""

    id: str
    reused: bool


class Batch(msgspec.Struct, frozen=True):
    """One call: its jobs, and the key under which a repeat of the call returns the same ids.

    `ids` are in the order of the caller; in `jobs`, each job comes after the ones it needs.
    """

    jobs: Sequence[Submission]
    ids: Sequence[str]
    tenant: str
    key: str | None = None
    body: str | None = None
    defaults: Mapping[str, Any] = {}
    """The caller's settings, for fields that neither the job nor the defaults of its function set."""
    functions: Mapping[str, FunctionDefaults] = {}
    """The functions that the caller's own application knows."""

    def answer(self, existing: Sequence[Mapping[str, Any]]) -> list[Accepted]:
        """Turn the rows of jobs that exist already, (id, asked), into the answer for all jobs."""
        if existing and existing[0]["asked"] is None:
            # The rows of a repeat are in the order of the first call's jobs, which is not the order of its ids.
            own = {job.id: row["id"] for job, row in zip(self.jobs, existing, strict=True)}
            return [Accepted(own[job_id], True) for job_id in self.ids]
        joined = {row["asked"]: row["id"] for row in existing}
        return [Accepted(joined.get(job_id, job_id), job_id in joined) for job_id in self.ids]


def with_defaults(job: Submission, defaults: Mapping[str, Any]) -> Submission:
    """Fill in fields that a job leaves out: from the defaults, else with the built-in values."""
    missing = {name: value for name, value in defaults.items() if _left_out(getattr(job, name, None))}
    whole = {
        "queue": job.queue or QUEUE,
        "max_attempts": job.max_attempts or MAX_ATTEMPTS,
        "priority": 0 if job.priority is UNSET else job.priority,
        **missing,
    }
    if whole.get("retry") is not None:
        whole["retry"] = decoding.convert(whole["retry"], RetryPolicy)
    return msgspec.structs.replace(job, **whole)


def complete(batch: Batch, registered: Mapping[str, FunctionDefaults]) -> Batch:
    """Fill in fields that the jobs of a call leave out: from their functions, else from the caller's settings."""
    jobs = [with_defaults(job, {**batch.defaults, **_of_function(job, batch, registered)}) for job in batch.jobs]
    return msgspec.structs.replace(batch, jobs=jobs)


def _of_function(job: Submission, batch: Batch, registered: Mapping[str, FunctionDefaults]) -> Mapping[str, Any]:
    if job.runner != FUNCTION:
        return {}
    name = job.spec["name"]
    defaults = newer(batch.functions.get(name), registered.get(name))
    return defaults if job.lane is not None else of_job(defaults, name, job.inputs)


def _left_out(value: Any) -> bool:
    return value is None or value is UNSET or value in ({}, ())


def build_batch(
    jobs: Sequence[Submission | Mapping[str, Any]],
    tenant: str,
    key: str | None,
    sent: Sequence[Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    functions: Mapping[str, FunctionDefaults] | None = None,
) -> Batch:
    """Check a whole call and prepare it for a store; every error names the field.

    `sent` is what the caller sent, if that differs from the jobs: a repeat of the call is recognised by it. `defaults`
    fill in fields that neither a job nor the defaults of its function set. `functions` are those that the caller knows.
    """
    if key is not None and not (1 <= len(key) <= MAX_KEY and key.isprintable()):
        raise Invalid("idempotency_key", f"has {len(key)} characters; between 1 and {MAX_KEY} are accepted")
    if isinstance(jobs, Submission | Mapping | str):
        raise Invalid("jobs", "is not a list; put a single job into one")
    check_batch_size(len(jobs))
    if not 1 <= len(tenant) <= 200 or not tenant.isprintable():
        raise Invalid("tenant", "is empty, over 200 characters, or has control characters")
    backoff = (defaults or {}).get("retry")
    checked = [
        check(job if isinstance(job, Submission) else parse(_complete_retry(job, backoff)), tenant) for job in jobs
    ]
    ids = [job.id for job in checked if job.id is not None]
    body = None if key is None else fingerprint(sent or jobs)
    return Batch(in_order(checked), ids, tenant, key, body, defaults or {}, functions or {})


def _complete_retry(job: Mapping[str, Any], backoff: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Complete a `retry` that only says what to retry on."""
    retry = job.get("retry") if backoff is not None and isinstance(job, Mapping) else None
    if not isinstance(retry, Mapping) or backoff is None:
        return job
    base, cap = retry.get("base", backoff["base"]), retry.get("cap", backoff["cap"])
    if "base" not in retry and isinstance(cap, int | float):
        base = min(base, cap)
    if "cap" not in retry and isinstance(base, int | float):
        cap = max(base, cap)
    return {**job, "retry": {**retry, "base": base, "cap": cap}}


def check_batch_size(count: int) -> None:
    """Refuse a call with no job or too many, before the jobs are checked."""
    if not 1 <= count <= MAX_BATCH:
        raise Invalid("jobs", f"{count} jobs in one call; between 1 and {MAX_BATCH} are accepted")


def fingerprint(jobs: Sequence[Any]) -> str:
    """Return a hash of a call's body as it was sent, before ids are assigned; as a UUID, which databases store well."""
    whole = msgspec.json.encode(jobs, order="deterministic", enc_hook=repr)
    return str(uuid.UUID(hashlib.md5(whole, usedforsecurity=False).hexdigest()))


def parse(data: Any) -> Submission:
    """Turn plain data into a Submission; every error names the field."""
    if isinstance(data, dict) and data.get("tasks") and "spec" not in data:
        data = data | {"spec": {}}
    try:
        return decoding.convert(data, Submission)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None


def parse_check(data: Any) -> Check:
    """Turn plain data into a readiness check; every error names the field."""
    try:
        asked = decoding.convert(data, Check)
    except msgspec.ValidationError as error:
        raise invalid_field(error, root="check") from None
    return validate_check(asked)


def validate_check(asked: Check) -> Check:
    """Check what the types of a readiness check cannot express."""
    if not asked.command or not asked.command[0]:
        raise Invalid("check.command", "is empty; give a program and its arguments")
    _check_field("check.command", asked.command)
    if len(asked.command) > MOST_ARGUMENTS or max(map(len, asked.command)) > MOST_ARGUMENT:
        raise Invalid(
            "check.command", f"has over {MOST_ARGUMENTS} arguments, or one with over {MOST_ARGUMENT} characters"
        )
    if not 0 < asked.timeout <= MOST_CHECK_SECONDS:
        raise Invalid("check.timeout", "must be a number of seconds above 0, at most a day")
    return asked


def check(submission: Submission, tenant: str) -> Submission:
    """Check what types cannot express; set the job's tenant, and an id if it has none."""
    if submission.tenant is not None and submission.tenant != tenant:
        raise Invalid("tenant", f"{submission.tenant!r} is not the caller's")
    submission = _with_pipeline_in_spec(submission)
    check_spec(submission.runner, submission.spec)
    if not (submission.kind + (submission.queue or "") + (submission.lane or "")).isprintable():
        raise _unprintable(submission)
    _check_json(submission)
    if submission.available_at is not None and not FIRST_YEAR <= submission.available_at.year <= LAST_YEAR:
        raise Invalid("available_at", f"is not between the years {FIRST_YEAR} and {LAST_YEAR}")
    if submission.check is not None:
        validate_check(submission.check)
    check_names("secrets", submission.secrets)
    if submission.uploads and not runner_named(submission.runner).work_folder:
        raise Invalid("uploads", f"are for jobs with a work folder: a {submission.runner} has none")
    if submission.uploads and "tasks" in submission.spec:
        raise Invalid("uploads", NO_UPLOADS)
    check_retry(submission.retry)
    job_id = new_id() if submission.id is None else _canonical_id("id", submission.id)
    if not submission.needs:
        return msgspec.structs.replace(submission, id=job_id, tenant=tenant)
    needs = tuple(_canonical_id(f"needs[{n}]", need) for n, need in enumerate(submission.needs))
    if len(set(needs)) != len(needs):
        raise Invalid("needs", "names a job twice")
    if job_id in needs:
        raise Invalid("needs", f"job {job_id} needs itself")
    return msgspec.structs.replace(submission, id=job_id, tenant=tenant, needs=needs)


def check_retry(retry: RetryPolicy | None) -> None:
    """Refuse a backoff that cannot be."""
    if retry is not None and not 0 <= retry.base <= retry.cap:
        raise Invalid("retry", f"base {retry.base:g} must be between 0 and cap {retry.cap:g}")
    if retry is not None and retry.cap > LONGEST:
        raise Invalid("retry", f"cap must be at most {LONGEST} seconds")


def _with_pipeline_in_spec(submission: Submission) -> Submission:
    """Move the fields of a pipeline into its spec, where every database and worker finds them."""
    if not any(_pipeline_fields_of(submission)):
        return submission
    given = {name: value for name in PIPELINE_FIELDS if (value := getattr(submission, name))}
    if not submission.tasks:
        raise Invalid(next(iter(given)), "is for pipelines: give tasks, too")
    for name in given:
        if name in submission.spec:
            raise Invalid(f"spec.{name}", f"is given twice: here, and as {name} of the job")
    spec = submission.spec | msgspec.to_builtins(given)
    return msgspec.structs.replace(submission, spec=spec, tasks=(), connector=None, snapshot=None, base=None)


def _canonical_id(field: str, text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise Invalid(field, f"not a UUID: {text[:60]!r}") from None


def _unprintable(submission: Submission) -> Invalid:
    fields = ("kind", "queue", "lane")
    field = next(name for name in fields if not (getattr(submission, name) or "").isprintable())
    return Invalid(field, "has control characters")


def _check_json(submission: Submission) -> None:
    """Check the whole job at once, which is fast; search for the field only after an error."""
    try:
        encoded = msgspec.json.encode(submission)
        if len(encoded) <= MAX_PAYLOAD and b"\\u0000" not in encoded:
            return
    except (ValueError, TypeError, RecursionError, OverflowError):
        pass
    for field in Submission.__struct_fields__:
        if (value := getattr(submission, field)) is not UNSET:
            _check_field(field, value)


def _check_field(field: str, value: Any) -> None:
    try:
        encoded = msgspec.json.encode(value)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise Invalid(field, f"cannot be written as JSON ({error})") from None
    if len(encoded) > MAX_PAYLOAD:
        raise TooLarge(field, f"{len(encoded)} bytes; at most {MAX_PAYLOAD} are accepted")
    if b"\\u0000" in encoded and _has_nul(value):
        raise Invalid(field, "has a NUL character, which databases cannot store in text")


def _has_nul(value: Any) -> bool:
    if isinstance(value, str):
        return "\0" in value
    if isinstance(value, Mapping):
        return any(_has_nul(key) or _has_nul(item) for key, item in value.items())
    return isinstance(value, list | tuple) and any(_has_nul(item) for item in value)
