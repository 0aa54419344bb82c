"""Write the rules of a submission's fields for Postgres, from the types in Python: `make schema` runs this.

The SQL function `holdfast_submit` checks the jobs of callers in any language by these rules, and refuses with the words
that msgspec uses here. So a field is described once, as a type; what types cannot express is in submit_checks.sql.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from holdfast.model import RetryPolicy
from holdfast.runner.function_descriptor import FunctionSpec
from holdfast.submission import (
    FIRST_YEAR,
    LAST_YEAR,
    MAX_BATCH,
    MAX_KEY,
    MAX_PAYLOAD,
    MOST_ARGUMENT,
    MOST_ARGUMENTS,
    MOST_CHECK_SECONDS,
    Submission,
)

FILE = Path(__file__).parents[1] / "src/holdfast/store/sql/repeatable/postgres/submission_rules.sql"
HEAD = """\
-- What may be in the fields of a submission. Written by `make schema` from the types in Python; do not edit.
-- `expected` is how an error message names the type; `null` says that null stands for a field that is left out.
CREATE OR REPLACE FUNCTION holdfast.submission_rules() RETURNS jsonb
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $rules$ SELECT $json$
"""
TAIL = "\n$json$::jsonb $rules$;\n"
LIMITS = ("gt", "ge", "lt", "le", "min_length", "max_length")


def rules() -> dict[str, Any]:
    return {
        "job": _rule(inspect.type_info(Submission)),
        "function": _rule(inspect.type_info(FunctionSpec)),
        "limits": {
            "jobs": MAX_BATCH,
            "key": MAX_KEY,
            "bytes": MAX_PAYLOAD,
            "first_year": FIRST_YEAR,
            "last_year": LAST_YEAR,
            "arguments": MOST_ARGUMENTS,
            "argument": MOST_ARGUMENT,
            "check_seconds": MOST_CHECK_SECONDS,
        },
        "backoff": {"base": RetryPolicy().base, "cap": RetryPolicy().cap},
    }


def _rule(info: inspect.Type) -> dict[str, Any]:
    if isinstance(info, inspect.UnionType):
        (inner,) = (one for one in info.types if not isinstance(one, inspect.NoneType))
        rule = _rule(inner)
        return {**rule, "expected": f"{rule['expected']} | null", "null": True}
    limits = {name: limit for name in LIMITS if (limit := getattr(info, name, None)) is not None}
    if isinstance(info, inspect.FloatType):
        limits = {name: float(limit) for name, limit in limits.items()}
    return {**_shape(info), **limits}


def _shape(info: inspect.Type) -> dict[str, Any]:
    match info:
        case inspect.StructType():
            return {
                "type": "struct",
                "expected": "object",
                "fields": {field.name: _rule(field.type) for field in info.fields},
                "required": [field.name for field in info.fields if field.required],
            }
        case inspect.DictType():
            return {
                "type": "map",
                "expected": "object",
                "keys": _rule(info.key_type),
                "values": _rule(info.value_type),
            }
        case inspect.VarTupleType():
            return {"type": "array", "expected": "array", "items": _rule(info.item_type)}
        case inspect.LiteralType():
            return {"type": "enum", "expected": "str", "values": sorted(map(str, info.values))}
        case inspect.AnyType():
            return {"type": "any", "expected": "any"}
    names = {
        inspect.StrType: "str",
        inspect.IntType: "int",
        inspect.FloatType: "float",
        inspect.BoolType: "bool",
        inspect.DateTimeType: "datetime",
    }
    return {"type": names[type(info)], "expected": names[type(info)]}


def text(revision: int) -> str:
    written = msgspec.json.format(msgspec.json.encode(rules()), indent=1).decode()
    # One field a line: a change of a type is a change of its line.
    written = re.sub(r"\n {4,}|\n {3}(?=[}\]])", "", written)
    return f"-- revision: {revision}\n{HEAD}{written}{TAIL}"


def write() -> None:
    """Write the file, with the next revision if its rules changed."""
    now = FILE.read_text() if FILE.exists() else "-- revision: 0\n"
    revision = int(now.split("\n", 1)[0].removeprefix("-- revision: "))
    if now != text(revision):
        FILE.write_text(text(revision + 1))


if __name__ == "__main__":
    write()
