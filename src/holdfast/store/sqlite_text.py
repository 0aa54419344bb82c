"""SQLite's text of SQL that is written for Postgres, where the two differ only in form.

Most statements exist once, as Postgres takes them. The rules here are the whole difference in form: the schema's name,
casts, row locks, the names of functions, times as microseconds, and lists and tables as JSON. A statement that needs
another shape on SQLite has its own text below `-- sqlite` in its entry; none of these rules is applied to that.
"""

import re

_PLAIN = (
    (re.compile(r"\bholdfast\.(?=\w)"), ""),
    (re.compile(r"/\*sqlite (.*?) \*/"), r"\1"),
    (re.compile(r"\bt\.now_at\b"), "clock()"),  # Constant within a transaction; Postgres reads it once per statement.
    (re.compile(r"::[a-z]\w*(?:\[\])?"), ""),
    (re.compile(r"\n?[ ]*\bFOR (?:NO KEY )?UPDATE(?: OF \w+)?(?: SKIP LOCKED)?(?=[\n;)]|$)"), ""),
    (re.compile(r"\bgreatest\("), "max("),
    (re.compile(r"\bleast\("), "min("),
    (re.compile(r"\bjson_build_object\("), "json_object("),
    (re.compile(r"\bjson_agg\("), "json_group_array("),
    (re.compile(r' COLLATE "C"'), ""),
    (re.compile(r"\bspec ->> 'base'"), "spec ->> '$.base'"),  # As the index specs_base has it.
    (re.compile(r"\bIS DISTINCT FROM\b"), "IS NOT"),
    (re.compile(r"\bIS NOT DISTINCT FROM\b"), "IS"),
    (re.compile(r"\bNOT ([a-z]\w*\.[a-z]\w*)\b(?!\()"), r"\1 = 0"),
    (re.compile(r"'-infinity'"), "0"),
    (re.compile(r"'infinity'"), "9223372036854775807"),
    (re.compile(r"\bSELECT (\w+) FROM json_array_elements_text\((:\w+)\) AS \1\b"), r"SELECT value FROM json_each(\2)"),
    (re.compile(r"= ANY \(ARRAY(\([^()]+\([^()]+\)[^()]*\))\)"), r"IN \1"),
    (re.compile(r"= ANY \((:\w+)\)"), r"IN (SELECT value FROM json_each(\1))"),
    (re.compile(r"\bLATERAL (?=json_)"), ""),
    (re.compile(r"\bCREATE OR REPLACE VIEW (\w+)"), r"DROP VIEW IF EXISTS \1;\nCREATE VIEW \1"),
)
"""In this order: the later ones find no schema's name and no cast."""
_TABLE = re.compile(r"(?:json_to_recordset\((:\w+)\)|(:\w+)) AS (\w+)\(([^)]+)\)")
_LIST = re.compile(r"json_array_elements(?:_text)?\(([^()]+)\)(?: WITH ORDINALITY)? AS (\w+)\((\w+)(?:, (\w+))?\)")
_RETURNING = re.compile(r"\bRETURNING [^;)]*")
_ALIAS = re.compile(r"\b[a-z]\w*\.(?=\w)")
"""RETURNING knows only the changed table, and that not by its alias."""
_SECONDS = re.compile(r"\bmake_interval\(secs => ")
_EPOCH = re.compile(r"\bextract\(epoch FROM ")


def sqlite_text(text: str) -> str:
    """Return SQLite's form of a text."""
    for pattern, form in _PLAIN:
        text = pattern.sub(form, text)
    text = _RETURNING.sub(lambda found: _ALIAS.sub("", found[0]), text)
    return _with_lists(_with_tables(_with_microseconds(text)))


def _with_microseconds(text: str) -> str:
    """Turn intervals into whole microseconds, and differences of times into seconds."""
    while (found := _SECONDS.search(text) or _EPOCH.search(text)) is not None:
        end = _closing(text, found.end())
        value = text[found.end() : end]
        operand = value if re.fullmatch(r"[:.\w]+", value) else f"({value})"
        form = f"CAST({operand} * 1000000 AS INTEGER)" if found.re is _SECONDS else f"({operand} / 1000000.0)"
        text = text[: found.start()] + form + text[end + 1 :]
    return text


def _closing(text: str, start: int) -> int:
    """Return where the parenthesis closes that is open at `start`."""
    depth = 1
    for n in range(start, len(text)):
        depth += (text[n] == "(") - (text[n] == ")")
        if not depth:
            return n
    raise ValueError(f"no closing parenthesis: {text[start : start + 60]}")


def _with_tables(text: str) -> str:
    """Turn a parameter that is a table into JSON: its columns are the fields of each element."""
    for found in _TABLE.finditer(text):
        name, alias = found[1] or found[2], found[3]
        columns = "|".join(column.split()[0] for column in found[4].split(","))
        text = text.replace(found[0], f"json_each({name}) AS {alias}")
        text = re.sub(rf"\b{alias}\.({columns})\b", rf"{alias}.value ->> '\1'", text)
    return text


def _with_lists(text: str) -> str:
    """Turn the elements of a JSON array, perhaps with their numbers, into the rows of `json_each`."""
    for found in _LIST.finditer(text):
        source, alias, element, number = found.groups()
        text = text.replace(found[0], f"json_each({source}) AS {alias}")
        text = re.sub(rf"\b{alias}\.{element}\b", f"{alias}.value", text)
        if number:
            text = re.sub(rf"\b{alias}\.{number}\b", f"({alias}.key + 1)", text)
    return text
