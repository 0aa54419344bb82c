"""Write the pages of `docs/reference/` from the code: `make docs`. A test notices when they are not current."""

import ast
import dataclasses
import json
import re
import sqlite3
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from scripts.python_reference import entries as python_entries
from scripts.python_reference import errors as python_errors

from holdfast import errors
from holdfast.api import openapi
from holdfast.api.app import declared
from holdfast.catalogue import ACTIONS, CODES, EVENTS, FREE
from holdfast.cli.main import app
from holdfast.config import PLATFORM_VARIABLES, PREFIX, Settings
from holdfast.store.migrate import migrations
from holdfast.store.repeatable import repeatables

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "reference"
SOURCES = ROOT / "src" / "holdfast"
POSTGRES = ROOT / "tests" / "store" / "schema" / "postgres.sql"
MADE = "<!-- Made from the code by `make docs`. Change it there. -->"
OWN = ("help", "install_completion", "show_completion")
TABLES = {
    "jobs": "One narrow row per job, with its open attempt; changes at every move.",
    "specs": "What the caller submitted; never changes, except for a raised budget.",
    "labels": "Which jobs have a label, in the order of job lists.",
    "attempts": "One row per ended attempt. Two events of the history come from it.",
    "events": "The events of the history that no other table provides.",
    "needs": "Dependencies: which job waits for which; each is marked as met once.",
    "reuse": "The job that a reuse key returns: the live one, else the last one.",
    "idempotency": "The jobs that a call with an idempotency key created.",
    "lanes": "Holder, next position, paused, readiness check.",
    "queues": "The settings of queues.",
    "workers": "Registered workers: last heartbeat, host, and what they can run.",
    "leaders": "Which process leads each duty.",
    "tokens": "API tokens. The secret is not stored, only its SHA-256.",
    "audit": "The audit trail: who changed what, written in the transaction of the change; removed by age.",
    "installation": "One row: a random id, made by the migration.",
    "migrations": "Which migrations were applied, and when.",
    "repeatables": "Which files of views, functions and triggers were applied, and when.",
    "tasks": "One row per task of a pipeline job: its status, and the snapshot that it made.",
    "snapshots": "Stored workspaces, each named by the hash of what made it.",
    "functions": "Defaults for the jobs of functions, from their decorators, registered by workers.",
    "totals": "The sums of the counters of workers that are gone, for `/metrics`.",
    "builds": "Which lease builds a snapshot.",
    "job_records": "A job as people see it: what was submitted, and its status.",
    "ledger_events": "The events that come from specs and attempts: accepted, claimed, ended.",
    "job_events": "The whole history of every job, for people with SQL.",
}


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(_cell(value) for value in row)} |" for row in lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def code(value: object) -> str:
    return f"`{value}`"


def page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", MADE, *parts]) + "\n"


# Settings


def settings() -> str:
    rows = [
        (
            code(f"{PREFIX}{field.name.upper()}"),
            code(field.name),
            "none" if field.default is None else code(_plain(field.default)),
            field.metadata["about"],
        )
        for field in dataclasses.fields(Settings)
    ]
    return page(
        "Settings",
        "Defaults < file < environment < flags. `HOLDFAST_CONFIG` names the file, TOML with the names of the second "
        f"column. {' and '.join(code(name) for name in sorted(PLATFORM_VARIABLES))} are read "
        "where holdfast's own are not set. "
        "`holdfast check` shows the settings in effect, and every mistake at once.",
        table(("environment", "in the file", "default", "what"), rows),
    )


def _plain(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


# The command line


def cli() -> str:
    parts = [
        "`holdfast --install-completion` sets up your shell: Tab then offers commands, options, job ids, lanes, "
        "queues, hosts and tools. `--json` (or `HOLDFAST_JSON=1`) prints what the server answered; of events, one "
        "per line. An option that may be repeated takes its values from the environment with spaces between them."
    ]
    for path, command in commands(typer.main.get_command(app)):
        parts += [f"## `{' '.join(('holdfast', *path))}`", *_command(path, command)]
    return page("Command line", *parts)


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from commands(inner, (*path, name))


def _command(path: tuple[str, ...], command: Any) -> Iterator[str]:
    yield str(command.help)
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = [one for one in command.params if one.param_type_name == "option" and one.name not in OWN]
    if arguments:
        yield table(("argument", "what"), ((code((one.metavar or one.name).upper()), one.help) for one in arguments))
    if options:
        rows = []
        for one in options:
            twin = one.envvar or "_".join(("HOLDFAST", *path, one.name)).upper()
            default = "" if one.default is None or one.default is False or callable(one.default) else code(one.default)
            rows.append((", ".join(code(name) for name in reversed(one.opts)), code(twin), default, one.help))
        yield table(("option", "environment", "default", "what"), rows)


# HTTP


def http() -> str:
    document = openapi.document(declared())
    parts = [
        document["info"]["description"] + " The same as OpenAPI: `/openapi.json`; as a page: `/docs`.",
        "Every call may be refused: " + "; ".join(f"{status} {text}" for status, text in openapi.ERRORS.items()) + ".",
    ]
    by_tag: dict[str, list[str]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            text = "\n\n".join(_operation(method.upper(), path, operation))
            by_tag.setdefault(operation["tags"][0], []).append(text)
    for tag, texts in by_tag.items():
        parts += [f"## {tag.capitalize()}", *texts]
    parts.append("## Shapes")
    for name, schema in sorted(document["components"]["schemas"].items()):
        parts += [f"### {name}", *_shape(schema)]
    return page("HTTP", *parts)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f"### `{method} {path}`"
    role = re.search(r"`(\w+)`", operation.get("description", ""))
    answers = []
    for status, answer in operation["responses"].items():
        if status < "300":
            kinds = [_type(content["schema"]) for content in answer["content"].values()]
            answers.append(f"{status} {', '.join(dict.fromkeys(kinds))}")
    body = operation.get("requestBody")
    takes = "" if body is None else f" Takes {_type(next(iter(body['content'].values()))['schema'])}."
    who = f"Role `{role[1]}`." if role else "No token needed."
    yield f"{operation['summary']} {who}{takes} Answers {'; '.join(answers)}."
    rows = [
        (
            code(one["name"]),
            one["in"],
            _type(one["schema"]),
            one.get("description") or one["schema"].get("description", ""),
        )
        for one in operation["parameters"]
        if one["in"] != "header" or one["name"] != "Holdfast-Tenant"
    ]
    if rows:
        yield table(("parameter", "in", "type", "what"), rows)


def _shape(schema: Mapping[str, Any]) -> Iterator[str]:
    if schema.get("description"):
        yield str(schema["description"])
    if "enum" in schema:
        yield ", ".join(code(value) for value in schema["enum"])
        return
    required = set(schema.get("required", ()))
    rows = [
        (code(name), _type(one), "required" if name in required else _default(one))
        for name, one in schema.get("properties", {}).items()
    ]
    if rows:
        yield table(("field", "type", ""), rows)


def _default(one: Mapping[str, Any]) -> str:
    return f"default {code(json.dumps(one['default']))}" if "default" in one else "may be left out"


def _type(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower().replace('.', '')})"
    if "anyOf" in schema:
        return " or ".join(_type(one) for one in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(code(value) for value in schema["enum"])
    match schema.get("type"):
        case "array":
            return f"list of {_type(schema.get('items') or {})}"
        case "object" if schema.get("additionalProperties"):
            return f"map to {_type(schema['additionalProperties'])}"
        case None:
            return "anything"
    bounds = [f"{word} {schema[name]}" for name, word in BOUNDS.items() if name in schema]
    return " ".join([str(schema.get("format", schema["type"])), *([f"({', '.join(bounds)})"] if bounds else [])])


BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "over",
    "maximum": "at most",
    "minLength": "at least",
    "maxLength": "at most",
    "pattern": "as",
}


# Python


def python() -> str:
    rows = [(code(name), code(kind.__mro__[1].__name__), more, text) for name, kind, more, text in python_errors()]
    return page(
        "Python",
        "Every public name, imported from `holdfast`. How they are used: [Python](../python.md), "
        "[functions](../functions.md), [transactions](../transactions.md).",
        *python_entries(),
        "## Errors\n\nEach has `code`, `status` (over HTTP) and `message`, as in [errors](errors.md). "
        "`holdfast.errors` is the module that most of them are defined in.",
        table(("error", "is a", "attributes", "means"), rows),
    )


# Errors, events


def problems() -> str:
    kinds = [(kind.code, kind.status, _about(kind)) for kind in _below(errors.HoldfastError)]
    return page(
        "Errors",
        '## Calls\n\n`{"error": {"code", "message", "details"}}`, with the status. In Python the classes of '
        "`holdfast.errors`; over HTTP the clients raise `Refused` with the same code.",
        table(("code", "HTTP", "what"), ((code(name), status, text) for name, status, text in kinds)),
        "## Jobs\n\nThe `code` in a job's `error`: why its last attempt did not succeed. What a child's own "
        "`result.json` says comes through as it is.",
        table(("code", "what"), ((code(name), text) for name, text in CODES.items())),
        "## The command line\n\n" + _exits(),
    )


def _below(kind: type[errors.HoldfastError]) -> Iterator[type[errors.HoldfastError]]:
    for one in kind.__subclasses__():
        if one.__module__ == errors.__name__:
            yield one
            yield from _below(one)


def _about(kind: type) -> str:
    text = (kind.__doc__ or "").partition("\n\n")[0].rstrip(".")
    return text[:1].lower() + text[1:] if not text[1:2].isupper() else text


def _exits() -> str:
    from holdfast.cli import main  # noqa: PLC0415

    found = " ".join((main.__doc__ or "").split()).partition("Exit codes: ")[2].rstrip(".")
    rows = [(code(part.split(" ", 1)[0]), part.split(" ", 1)[1]) for part in found.split("; ")]
    return table(("exit code", "what"), rows)


def events() -> str:
    rows = [(code(name), "the job" if name in FREE else "holdfast", text) for name, text in EVENTS.items()]
    return page(
        "Events",
        'One line of a job\'s history: `{"seq": 7, "at": "…Z", "type": "status", "task": null, "data": {…}}`. `seq` '
        "counts from 1 per job without a gap. A job's own events have names of their own; these are holdfast's:",
        table(("type", "said by", "data"), rows),
        "A stream of server-sent events has one more, which is not stored: `end`, with `status` and `reason`.",
    )


def audit() -> str:
    return page(
        "Audit trail",
        "What `GET /v1/audit` and `holdfast audit` list, by `action`: [access](../access.md#the-audit-trail) says who "
        "reads it and how long it is kept.",
        table(("action", "what"), ((code(name), text) for name, text in ACTIONS.items())),
    )


# The schema


def schema() -> str:
    database = sqlite3.connect(":memory:")
    for sql in [*(one.sql for one in migrations("sqlite")), *(one.sql for one in repeatables("sqlite"))]:
        database.executescript(sql)
    there = _postgres()
    parts = [
        "The tables, for people with SQL. Read them as you like (`job_records` and `job_events` are made for it); "
        "write only through holdfast, or on Postgres through `holdfast.holdfast_submit(jsonb)`. On SQLite times are "
        "microseconds since 1970, JSON and ids are text, booleans 0 and 1. On Postgres all is in the schema "
        "`HOLDFAST_SCHEMA`."
    ]
    found = database.execute(
        "SELECT type, name FROM sqlite_schema WHERE type IN ('table', 'view') ORDER BY type, rowid"
    )
    for kind, name in found.fetchall():
        columns = database.execute("SELECT name, type FROM pragma_table_info(?)", (name,)).fetchall()
        parts += [f"## `{name}`{' (a view)' if kind == 'view' else ''}", TABLES[name]]
        rows = [(code(column), there.get(f"{name}.{column}", "–"), of.lower() or "–") for column, of in columns]
        parts.append(table(("column", "Postgres", "SQLite"), rows))
        indexes = database.execute(
            "SELECT sql FROM sqlite_schema WHERE type = 'index' AND tbl_name = ? AND sql IS NOT NULL ORDER BY rowid",
            (name,),
        ).fetchall()
        if indexes:
            parts.append("\n".join(f"- `{_index(sql)}`" for (sql,) in indexes))
    database.close()
    return page("Schema", *parts)


def _index(sql: str) -> str:
    return " ".join(sql.split()).removeprefix("CREATE ").removeprefix("INDEX ")


def _postgres() -> Mapping[str, str]:
    """The types of columns, from the dump that a test keeps current."""
    found = {}
    for line in POSTGRES.read_text().splitlines():
        if (match := re.fullmatch(r"(\w+\.\w+) (.*?) (YES|NO) ?(.*)", line)) is not None:
            found[match[1]] = match[2].replace("timestamp with time zone", "timestamptz")
    return found


def modules() -> str:
    """Every module with the first sentence of its docstring, package by package."""
    parts = ["# Modules", MADE, "Each module and what it is for; [architecture](../architecture.md) says how they fit."]
    folders: dict[str, list[tuple[str, str]]] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        described = ast.get_docstring(ast.parse(path.read_text()))
        assert described, f"{path} has no docstring"
        name = "the package" if path.name == "__init__.py" else f"`{path.name}`"
        sentence = " ".join(described.split("\n\n")[0].split())
        folders.setdefault(path.parent.relative_to(SOURCES.parent).as_posix(), []).append((name, sentence))
    for folder, rows in folders.items():
        parts += [f"## `{folder}`", table(("file", "what is in it"), rows)]
    return "\n\n".join(parts) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings,
    "cli.md": cli,
    "python.md": python,
    "http.md": http,
    "errors.md": problems,
    "events.md": events,
    "audit.md": audit,
    "schema.md": schema,
    "modules.md": modules,
}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make())
        sys.stdout.write(f"{(FOLDER / name).relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
