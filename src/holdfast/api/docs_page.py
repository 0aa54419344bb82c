"""`/docs`: the OpenAPI document as a page to read.

Plain HTML and one style sheet inside it: no script, and nothing from this or any other host. Its
Content-Security-Policy forbids everything else.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h2 { margin-top: 2.5rem; } code, pre { font: 14px/1.5 ui-monospace, monospace; }
pre { background: #8881; padding: .6rem; overflow-x: auto; } table { border-collapse: collapse; }
td { padding: .1rem 1.5rem .1rem 0; vertical-align: top; } details { border-top: 1px solid #8884; padding: .4rem 0; }
summary { cursor: pointer; } summary b { display: inline-block; width: 4.5rem; } :root { color-scheme: light dark; }
"""
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    f"style-src 'sha256-{base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()}'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def page(document: Mapping[str, Any]) -> str:
    """Return the whole page."""
    info = document["info"]
    parts = [
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{_prose(info['description'])}</p>",
        '<p>For programs: <a href="openapi.json">openapi.json</a></p>',
        *_operations(document),
        "<h2>Shapes</h2>",
        *(
            f'<details id="{escape(name)}"><summary><code>{escape(name)}</code></summary>{_json(schema)}</details>'
            for name, schema in sorted(document["components"]["schemas"].items())
        ),
    ]
    head = f'<meta charset="utf-8"><title>{escape(info["title"])}: the API</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _operations(document: Mapping[str, Any]) -> Iterable[str]:
    tag = None
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            if operation["tags"][0] != tag:
                tag = operation["tags"][0]
                yield f"<h2>{escape(tag)}</h2>"
            yield _operation(method, path, operation)


def _operation(method: str, path: str, operation: Mapping[str, Any]) -> str:
    summary = f"<b>{method.upper()}</b> <code>{escape(path)}</code> {_prose(operation['summary'])}"
    parts = [f"<p>{_prose(operation.get('description', ''))}</p>"]
    if operation["parameters"]:
        parts.append(_table(_parameter(parameter) for parameter in operation["parameters"]))
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"<h4>Body: <code>{escape(media)}</code></h4>{_content(content)}")
    parts.append("<h4>Answers</h4>" + _table(_answer(*answer) for answer in operation["responses"].items()))
    return f"<details><summary>{summary}</summary>{''.join(parts)}</details>"


def _parameter(parameter: Mapping[str, Any]) -> tuple[str, str, str, str]:
    need = "required" if parameter.get("required") else ""
    about = parameter.get("description") or parameter["schema"].get("description", "")
    schema = {name: value for name, value in parameter["schema"].items() if name not in ("description", "title")}
    kind = f"<code>{escape(json.dumps(schema))}</code>"
    return f"<code>{escape(parameter['name'])}</code>", escape(parameter["in"]), f"{need} {kind}", _prose(about)


def _answer(status: str, answer: Mapping[str, Any]) -> tuple[str, str, str]:
    shapes = " ".join(_shape(content.get("schema", {})) for content in answer["content"].values())
    return status, _prose(answer["description"]), shapes


def _content(content: Mapping[str, Any]) -> str:
    examples = (
        f"<p>{escape(name)}:</p>{_json(example['value'])}" for name, example in content.get("examples", {}).items()
    )
    return f"<p>{_shape(content.get('schema', {}))}</p>{''.join(examples)}"


def _shape(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#{name}"><code>{name}</code></a>'
    if "anyOf" in schema:
        return " or ".join(_shape(one) for one in schema["anyOf"])
    return f"<code>{escape(str(schema.get('type', 'any')))}</code>"


def _table(rows: Iterable[tuple[str, ...]]) -> str:
    cells = ("".join(f"<td>{cell}</td>" for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def _json(value: Any) -> str:
    return f"<pre>{escape(json.dumps(value, indent=2, ensure_ascii=False))}</pre>"


def _prose(text: str) -> str:
    """Convert text to HTML; words in backquotes become code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if n % 2 else part for n, part in enumerate(parts))
