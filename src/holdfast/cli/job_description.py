"""From the options of the command line to the job that is sent, and to errors that name the line of its file."""

from collections.abc import Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.job_file import STDIN, TextFile, read_object
from holdfast.cli.job_options import JobOptions
from holdfast.cli.option_values import number, numbers, pairs, parse_value
from holdfast.cli.session import USAGE, fail, find_job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from holdfast.client.http import AsyncClient
    from holdfast.response_types import JobView

PLAIN = (
    *("kind", "queue", "lane", "priority", "max_attempts", "on_lost", "timeout", "queue_timeout", "idle_timeout"),
    *("stop_grace", "stop_after", "reuse_key", "connector", "snapshot", "base"),
)
"""Fields of a job that are options of the same name and value."""
SPEC = ("user", "network", "memory", "cpus", "pids", "file_size", "folder_size")
"""Fields of a spec that are options of the same name and value."""
WAYS = "a command after --, --image, --tool, --function, --runner, --file"
CHECK_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """A job as it will be sent, but for its files and for ids that are still short."""

    job: dict[str, Any]
    needs: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    key: str | None = None
    source: TextFile | None = None

    async def submit(self, client: "AsyncClient") -> "JobView":
        """Upload the files, complete the ids, and submit the job."""
        job = dict(self.job)
        if self.needs:
            job["needs"] = [*job.get("needs", ()), *[await find_job(client, text) for text in self.needs]]
        if self.files:
            job["uploads"] = [*job.get("uploads", ()), await client.upload(*self.files)]
        with located_in(self.source):
            return await client.submit(job, key=self.key)


def describe(options: JobOptions) -> JobDescription:
    """Build a job from the options of the command line."""
    _refuse_two_readers_of_stdin(options)
    source = None if options.file is None else read_object("--file", options.file)
    job = dict(source.content) if source else {}
    way = _only_way(options)
    spec = _spec(options, way)
    if options.tool:
        job["tool"] = options.tool
    elif options.runner or options.function or options.command or options.image:
        named = "function" if options.function else "docker" if options.image else "process"
        job |= {"runner": options.runner or named, "spec": spec}
    elif spec:
        job["spec"] = {**_object(job, "spec"), **spec}
    job |= _fields(options)
    for name, given in (("labels", pairs("--label", options.labels)), ("inputs", _inputs(options))):
        if given:
            job[name] = {**_object(job, name), **given}
    files, ids = _uploads(options.uploads or ())
    if options.key is not None and (files or options.delay is not None):
        fail(
            "--key: a repeat must be the same request; use --at instead of --delay, and ids of `holdfast upload`", USAGE
        )
    if ids:
        job["uploads"] = [*job.get("uploads", ()), *ids]
    return JobDescription(job=job, needs=tuple(options.needs or ()), files=files, key=options.key, source=source)


def _object(job: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object of the file that options add to."""
    found = job.get(name, {})
    if not isinstance(found, dict):
        fail(f"--file: {name} must be an object", USAGE)
    return found


def _only_way(options: JobOptions) -> str:
    ways = {
        "a command": options.command, "--tool": options.tool, "--function": options.function,
        "--file": options.file, "--image": options.image, "--runner": options.runner,
    }  # fmt: skip
    given = [name for name, value in ways.items() if value and not (name == "--image" and options.command)]
    if len(given) != 1:
        fail(f"give one of: {WAYS} ({' and '.join(given) or 'none'} given)", USAGE)
    return given[0]


def _spec(options: JobOptions, way: str) -> dict[str, Any]:
    """Return the fields of the spec that options give."""
    given: dict[str, Any] = {name: parse_value(text) for name, text in pairs("--spec", options.spec).items()}
    given |= {name: value for name in SPEC if (value := getattr(options, name)) is not None}
    given |= {"env": pairs("--env", options.env)} if options.env else {}
    given |= {"stdin": _text_of("--stdin", options.stdin)} if options.stdin is not None else {}
    given |= {"require_result": True} if options.require_result else {}
    if given and way in ("--tool", "--function"):
        option = f"--{next(iter(given)).replace('_', '-')}" if not options.spec else "--spec"
        fail(f"{option} is for a command or an image; {way} has its own environment and limits", USAGE)
    given |= {"name": options.function} if options.function else {}
    given |= {"command": options.command} if options.command else {}
    given |= {"image": options.image} if options.image else {}
    return given


def _fields(options: JobOptions) -> dict[str, Any]:
    """Return the fields of the job that options give, but for what is merged with the file's."""
    given = {name: value for name in PLAIN if (value := getattr(options, name)) is not None}
    given |= {name: True for name in ("hold", "rebuild") if getattr(options, name)}
    given |= {"id": options.job_id} if options.job_id is not None else {}
    given |= {"secrets": options.secrets} if options.secrets else {}
    given |= {"budget": numbers("--budget", options.budget)} if options.budget else {}
    given |= {"retry": _retry(options.retry)} if options.retry else {}
    given |= {"available_at": available_at} if (available_at := _available_at(options)) is not None else {}
    given |= {"check": check} if (check := _check(options)) is not None else {}
    return given


def _available_at(options: JobOptions) -> str | None:
    from holdfast.cli.times import after, moment

    if options.delay is not None and options.at is not None:
        fail("give one of: --delay, --at", USAGE)
    if options.delay is not None:
        return after("--delay", options.delay).isoformat()
    return None if options.at is None else moment("--at", options.at).isoformat()


def _check(options: JobOptions) -> dict[str, Any] | None:
    import shlex

    if options.check is None:
        if options.check_timeout is not None:
            fail("--check-timeout is for a readiness check; give --check, too", USAGE)
        return None
    try:
        command = shlex.split(options.check)
    except ValueError as error:
        fail(f"--check {options.check!r}: {error}", USAGE)
    return {"command": command, "timeout": options.check_timeout or CHECK_SECONDS}


def _retry(texts: list[str]) -> dict[str, Any]:
    given = pairs("--retry", texts)
    known = {"base", "cap", "on"}
    if unknown := set(given) - known:
        fail(f"--retry {unknown.pop()}: use one of {', '.join(sorted(known))}", USAGE)
    return {name: text.split(",") if name == "on" else number("--retry", name, text) for name, text in given.items()}


def _inputs(options: JobOptions) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if (text := options.inputs_from) is not None:
        given = read_object("--inputs", text[1:]).content if text.startswith("@") else _json_object("--inputs", text)
    return given | {name: parse_value(text) for name, text in pairs("--input", options.inputs).items()}


def _json_object(option: str, text: str) -> dict[str, Any]:
    found = parse_value(text)
    if not isinstance(found, dict):
        fail(f"{option}: must be a JSON object, or @FILE", USAGE)
    return found


def _uploads(given: Iterable[str]) -> tuple[tuple[Path, ...], list[str]]:
    """Separate files from ids of earlier uploads: what exists here is a file."""
    files, ids = [], []
    for text in given:
        path = Path(text)
        if path.is_dir():
            fail(f"--upload {text}: is a folder; give its files", USAGE)
        if path.exists():
            files.append(path)
        elif "/" in text or "." in text:
            fail(f"--upload {text}: no such file; give a file, or the id that `holdfast upload` printed", USAGE)
        else:
            ids.append(text)
    return tuple(files), ids


def _text_of(option: str, name: str) -> str:
    """Read a text that becomes a part of the job."""
    import sys

    try:
        return sys.stdin.buffer.read().decode() if name == STDIN else Path(name).read_text(encoding="utf-8")
    except OSError as error:
        fail(f"{option} {name}: {error.strerror}", USAGE)
    except UnicodeDecodeError:
        fail(f"{option} {name}: is not UTF-8 text; give such a file to the job with --upload", USAGE)


def _refuse_two_readers_of_stdin(options: JobOptions) -> None:
    readers = {"--file -": options.file == STDIN, "--inputs @-": options.inputs_from == f"@{STDIN}",
               "--stdin -": options.stdin == STDIN}  # fmt: skip
    given = [name for name, reads in readers.items() if reads]
    if len(given) > 1:
        fail(f"only one of {' and '.join(given)} can read the standard input", USAGE)


def reads_stdin(options: JobOptions) -> bool:
    return STDIN in (options.file, options.stdin) or options.inputs_from == f"@{STDIN}"


@contextmanager
def located_in(source: TextFile | None) -> "Iterator[None]":
    """Add the file, the line and the nearest known name to a refusal of a field."""
    from holdfast.client.http import Refused

    try:
        yield
    except Refused as error:
        field = error.details.get("field") if isinstance(error.details, dict) else None
        if source is None or not isinstance(field, str):
            raise
        line = source.line_of(field)
        where = f"{source.name}, line {line}" if line else source.name
        raise Refused(error.status, error.code, f"{where}: {error.message}{_hint(field, error.message)}") from error


def _hint(field: str, message: str) -> str:
    """Suggest a name for an unknown field, or say where the names are."""
    import difflib

    from holdfast.submission import Submission

    if "unknown field" not in message or "." in field:
        return ""
    known = [*Submission.__struct_fields__, "tool"]
    near = difflib.get_close_matches(field, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; a job has {', '.join(sorted(known))}"
