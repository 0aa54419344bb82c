"""Translates a database's refusal into holdfast's errors, whichever driver reported it."""

import re

from holdfast.errors import (
    Conflict,
    HoldfastError,
    Invalid,
    NeedFailed,
    NotFound,
    QueueFull,
    ReplayedJobDeleted,
    StoreError,
    TooLarge,
)

_UNKNOWN = re.compile(r"no job \(named in needs\) (\S+)$")
_FAILED = re.compile(r"needs: job (\S+) (\w+);")
_TAKEN = re.compile(r"\(id\)=\(([0-9a-f-]{36})\)")


def id_taken(job_id: str) -> Conflict:
    return Conflict(f"id: job {job_id} exists already")


def id_unusable(job_id: str) -> Conflict:
    """Return the error for an id of another tenant's job: it reveals nothing about that job."""
    return Conflict(f"id: {job_id} cannot be used; leave it out, or choose another random UUID")


GRANTS = {
    "database": "GRANT CREATE ON DATABASE {name} TO {role}",
    "schema": "GRANT USAGE ON SCHEMA {name} TO {role}; for `holdfast migrate` also CREATE",
    "table": "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}",
    "view": "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA {schema} TO {role}",
    "sequence": "GRANT USAGE ON ALL SEQUENCES IN SCHEMA {schema} TO {role}",
    "function": "GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {schema} TO {role}",
}
_DENIED = re.compile(r"permission denied for (?:materialized )?(\w+) (\S+)$")


def permission_denied(message: str, *, schema: str, role: str) -> StoreError:
    """Return an error that names the missing privilege and the GRANT to run; the schema's owner needs none."""
    found = _DENIED.search(message)
    if found and found[1] in GRANTS:
        way = f"as its owner, run: {GRANTS[found[1]].format(name=found[2], schema=schema, role=role)}"
    else:
        way = f"run `holdfast migrate` as the role that owns schema {schema}"
    return StoreError(f"Postgres: {message}, for role {role}; {way}")


def need_unknown(job_id: str) -> NotFound:
    return NotFound("job (named in needs)", job_id)


def error_from_sqlstate(sqlstate: str, message: str, detail: str | None) -> HoldfastError | None:
    """Translate an error of Postgres; None if it is not about the request or the schema."""
    field = detail or "job"
    match sqlstate:
        case "HF404":
            unknown = _UNKNOWN.match(message)
            return need_unknown(unknown[1]) if unknown else NotFound(field, message)
        case "HF409":
            failed = _FAILED.match(message)
            return NeedFailed(failed[1], failed[2]) if failed else Conflict(message)
        case "HF410":
            return ReplayedJobDeleted(message)
        case "HF413":
            return TooLarge(field, message.removeprefix(f"{field}: "))
        case "HF422":
            return Invalid(field, message.removeprefix(f"{field}: "))
        case "HF429":
            return QueueFull(message)
        case "23505":
            taken = _TAKEN.search(detail or "")
            return id_taken(taken[1]) if taken else Conflict(f"refused by the database: {message} ({detail})")
        case "3F000" | "42P01" | "42883":
            return StoreError(f"{message}: run `holdfast migrate`")
    return None
