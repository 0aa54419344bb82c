"""The reference page of the Python API: every public name of `holdfast`, with its signature and docstring."""

import ast
import enum
import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from types import FunctionType
from typing import Any

import holdfast
from holdfast.errors import HoldfastError

GROUPS: Mapping[str, Sequence[str]] = {
    "Applications and clients": ("Holdfast", "SyncHoldfast", "AsyncClient", "Client", "EmbeddedWorker"),
    "What a job runs": ("Process", "Container", "Pipeline", "Task", "Call", "Builder", "JobOptions", "Retry"),
    "Jobs": ("Job", "SyncJob", "JobRecord", "Status", "Event", "Attempt", "TaskRecord", "Artifact", "Explanation"),
    "Functions": ("Function", "Context", "CancelToken", "Cancelled"),
    "In your own transaction": ("submit_inside", "submit_inside_async", "Accepted"),
    "The service": ("asgi",),
}
"""The headings of the page. Errors follow; any other name has to be added here."""
MADE_FOR_YOU = ("SyncHoldfast", "EmbeddedWorker", "Job", "SyncJob", "Function", "Context", "CancelToken", "Builder")
"""Classes that a program does not construct itself."""
WIDTH = 100


def error_names() -> Sequence[str]:
    return [name for name in holdfast.__all__ if _is_error(getattr(holdfast, name))]


def undocumented() -> Sequence[str]:
    """Return the public names, methods and properties that say nothing of themselves."""
    found = []
    for name in holdfast.__all__:
        value = getattr(holdfast, name)
        if not _own_words(value):
            found.append(name)
        if isinstance(value, type):
            found += [f"{name}.{member}" for member, one in members(value) if not inspect.getdoc(one)]
    return found


def entries() -> Iterator[str]:
    """Yield the parts of the page."""
    for heading, names in GROUPS.items():
        yield f"## {heading}"
        for name in names:
            yield from _entry(name, getattr(holdfast, name))


def errors() -> Iterator[tuple[str, type[Exception], str, str]]:
    """Yield each error: its name, its class, the attributes that it adds, and what it means."""
    for name in error_names():
        kind = getattr(holdfast, name)
        yield name, kind, ", ".join(f"`{one}`" for one in _attributes(kind)), _own_words(kind)


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class, those of its bases first, in the order of the code."""
    names: dict[str, None] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("holdfast"):
            names |= dict.fromkeys(name for name in vars(base) if not name.startswith("_"))
    for name in names:
        value = inspect.getattr_static(kind, name)
        if isinstance(value, classmethod | staticmethod):
            value = value.__func__
        if isinstance(value, FunctionType | property):
            yield name, value


def _entry(name: str, value: Any) -> Iterator[str]:
    yield f"### `{name}`"
    if not isinstance(value, type):
        yield _code(_signature(value, name), value, name)
        yield _text(_own_words(value))
        return
    made = inspect.getattr_static(value, "__init__")
    if name not in MADE_FOR_YOU and isinstance(made, FunctionType) and not _fields(value):
        yield _code(_signature(made, name, of="class"), made, name, of="class")
    yield _text(_own_words(value))
    if rows := _fields(value):
        head = "| name | value | |" if issubclass(value, enum.Enum) else "| field | type | default |"
        yield "\n".join([head, "| --- | --- | --- |", *rows])
    yield from (_member(member, one) for member, one in members(value))


def _member(name: str, value: Any) -> str:
    if isinstance(value, property):
        assert value.fget is not None
        shown = f"`{name}: {_annotation(_node(value.fget).returns)}`"
    else:
        signature = _signature(value, name)
        shown = f"`{signature}`" if len(signature) <= WIDTH else f"`{name}`\n\n{_code(signature, value, name)}"
    return textwrap.indent(f"{shown}\n\n{_text(inspect.getdoc(value) or '')}", "  ").replace("  ", "- ", 1)


def _signature(value: Any, name: str, *, of: str = "", one_per_line: bool = False) -> str:
    """Return a signature as it stands in the code, without `self`; a blocking call's is that of its twin."""
    inner = inspect.unwrap(value)
    node = _node(inner)
    values = {name: one.default for name, one in inspect.signature(inner).parameters.items()}
    given = [one for one in _arguments(node.args, values) if one not in ("self", "cls")]
    arguments = "".join(f"\n    {one}," for one in given) + "\n" if one_per_line else ", ".join(given)
    awaited = "async " if isinstance(node, ast.AsyncFunctionDef) and inner is value else ""
    returns = "" if of or node.returns is None else f" -> {_annotation(node.returns)}"
    return f"{of + ' ' if of else awaited}{name}({arguments}){returns}"


def _arguments(arguments: ast.arguments, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield a signature's parameters one by one, with the marks between their kinds."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    for n, (one, default) in enumerate(zip(plain, defaults, strict=True), 1):
        yield _argument(one, default, values)
        if n == len(arguments.posonlyargs):
            yield "/"
    if arguments.vararg is not None:
        yield f"*{_argument(arguments.vararg, None)}"
    elif arguments.kwonlyargs:
        yield "*"
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield _argument(one, default, values)
    if arguments.kwarg is not None:
        yield f"**{_argument(arguments.kwarg, None)}"


def _argument(one: ast.arg, default: ast.expr | None, values: Mapping[str, Any] = {}) -> str:
    given = "" if default is None else f" = {ast.unparse(default)}"
    if isinstance(default, ast.Name | ast.Attribute) and isinstance(values[one.arg], str | int | float):
        given = f" = {values[one.arg]!r}"
    return one.arg + ("" if one.annotation is None else f": {_annotation(one.annotation)}") + given


def _annotation(node: ast.expr | None) -> str:
    """Return an annotation as in the code, without the quotes of one that is read later."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return "Any" if node is None else ast.unparse(node)


def _node(function: Any) -> ast.FunctionDef | ast.AsyncFunctionDef:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node


@cache
def _class(kind: type) -> ast.ClassDef:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    return node


def _fields(kind: type) -> list[str]:
    """Return the rows of a record's, an option set's or an enumeration's fields, those of its bases first."""
    rows: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("holdfast") or ("__init__" in vars(base) and not _is_record(base)):
            continue
        for one in _class(base).body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.target.id[0] != "_":
                default = "" if one.value is None else f"`{ast.unparse(one.value)}`"
                rows[one.target.id] = _row(one.target.id, _annotation(one.annotation), default)
            elif isinstance(one, ast.Assign) and issubclass(kind, enum.Enum) and isinstance(one.targets[0], ast.Name):
                rows[one.targets[0].id] = _row(one.targets[0].id, ast.unparse(one.value), "")
    return list(rows.values())


def _is_record(kind: type) -> bool:
    return hasattr(kind, "__struct_fields__") or hasattr(kind, "__dataclass_fields__") or hasattr(kind, "_fields")


def _row(name: str, type: str, default: str) -> str:
    cells = (f"`{name}`", f"`{type}`", default)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _attributes(kind: type[Exception]) -> list[str]:
    """Return what an error's constructor stores, its bases' too, beside the message."""
    found: dict[str, None] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.startswith("holdfast"):
            for node in ast.walk(_class(base)):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr != "message":
                    found[node.attr] = None
    return list(found)


def _own_words(value: Any) -> str:
    """Return a docstring that was written for this name: not one of a base, nor one made by a decorator."""
    own = vars(value).get("__doc__") if isinstance(value, type) else value.__doc__
    text = inspect.cleandoc(own or "")
    made = isinstance(value, type) and (text.startswith(f"{value.__name__}(") or "enumeration" in text[:20])
    return "" if made else text


def _text(docstring: str) -> str:
    """Return a docstring as Markdown: what is indented in it is code."""
    parts: list[str] = []
    for part in docstring.split("\n\n"):
        indented = all(line.startswith("    ") for line in part.splitlines())
        if indented and parts and parts[-1].startswith("```"):
            parts[-1] = parts[-1].removesuffix("\n```") + f"\n\n{textwrap.dedent(part)}\n```"
        else:
            parts.append(f"```python\n{textwrap.dedent(part)}\n```" if indented and part else part)
    return "\n\n".join(parts)


def _code(signature: str, value: Any, name: str, *, of: str = "") -> str:
    shown = signature if len(signature) <= WIDTH else _signature(value, name, of=of, one_per_line=True)
    return f"```python\n{shown}\n```"


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, HoldfastError)
