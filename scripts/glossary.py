"""Keep to one word per concept: `make check` runs this, and docs/glossary.md says which words those are.

A module is not named by a word that the glossary replaced, no identifier is, and no sentence uses a phrase that a
reader has to puzzle over. `KNOWN` lists the files that still do, each with how often: a file may only get better.
"""

import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "tests", "torture", "bench", "scripts", "model", "docs", "examples")
SUFFIXES = (".py", ".md", ".sql", ".c", ".h", ".pml")
CODE = (".py", ".sql", ".c", ".h")
SELF = ("scripts/glossary.py", "tests/project/test_glossary.py", "docs/glossary.md")
MODULES: Mapping[str, frozenset[str]] = {
    "": frozenset({
        "desk", "speech", "taking", "course", "ledger", "staging", "journal", "completer", "shipper", "chores",
        "heart", "words", "views", "shapes", "losses", "accept", "guest", "inside", "moves", "refusals", "wake",
        "space", "removing", "children", "turns", "recipe", "spaces", "leading", "hub", "plans", "care", "talk",
        "ending", "tales", "stage", "rig", "fleet", "racers", "scenario", "callers", "utils", "helpers", "common",
        "manager",
    }),
    "src/holdfast": frozenset({"tasks"}),
    "src/holdfast/runner": frozenset({"spec", "host", "folder", "inputs", "outputs"}),
    "src/holdfast/duties": frozenset({"memory", "orphans", "uploads", "remover"}),
    "src/holdfast/cli": frozenset({"site", "view", "work"}),
    "src/holdfast/worker": frozenset({"tasks", "memory"}),
    "tests/support": frozenset({"attempt", "machine", "engine", "pages", "reference", "up", "pooler"}),
    "torture": frozenset({
        "holders", "witness", "breaks", "world", "entry", "final", "prices", "child", "servers",
        "story", "janitor",
    }),
    "torture/checks": frozenset({"falls", "leavings"}),
    "bench": frozenset({"sites", "pooler", "peers", "stops", "pickup", "drain"}),
}  # fmt: skip
"""Names that modules had and that nobody could guess, by the folder in which they are wrong; "" is every folder."""
REPLACED = frozenset({"said", "unsaid", "marked", "place", "Pulse", "Turn", "Run", "Need"})
IDENTIFIERS: Mapping[str, frozenset[str]] = {
    "": frozenset({
        "Hold", "stand_again", "behind", "told", "ledger", "turn", "turns", "worn", "rung", "course", "standing",
    }),
    "src/holdfast": frozenset({
        "Gone", "Needed", "Blocked", "NoQueue", "SharedFolderAway", "TooLate", "NotQuiet", "Refusals", "Buckets",
        "FirstHead", "FewRepeats", "Retain", "Kept", "Query", "Service", "Because", "Shown", "Streamed", "foresee",
        "asked_again", "sound_check", "refuse_count", "way_out", "accept_as_guest", "beats_of", "equip",
    }),
    **dict.fromkeys(
        (f"src/holdfast/{folder}" for folder in ("store", "model", "config", "api", "cli", "duties")),
        REPLACED | {"Retry", "Pipeline", "Container"},
    ),
    "src/holdfast/client": REPLACED,
    "tests": frozenset({
        "rig", "fleet", "racers", "tales", "scenario", "callers", "apart", "dawdle", "served", "served_apart", "box",
        "EXCUSES", "APART", "Quiet", "Member", "Served", "Up", "Daemon",
    }),
    "torture": frozenset({"Fall", "World", "Witness", "Janitor", "Break", "Shelf", "Course"}),
    "bench": frozenset({"Site"}),
}  # fmt: skip
"""Names that classes, functions and variables had, by the folder in which they are wrong, with the folders in it."""
PHRASES = {
    r"whoever": "name the one who acts, such as the worker or the caller",
    r"anew": "again",
    r"so long": "until, or while",
    r"twice is once": "idempotent",
    r"no claim: %s": "claim failed, retrying in %s: %s",
    r"told a second time": "second signal",
    r"feared lost": "possibly lost",
    r"behind the last": "past the last",
    r"(?<!')behind(?! an? | the last)": "after or past; `behind a proxy` is fine",
    r"never heard of": "does not know",
    r"is the tool's to say": "is set by tool X; remove it from the request",
    r"(?:is )?not one that a list answered": "is not a valid cursor",
    r"are uploaded and wait": "upload quota of N bytes exceeded",
    r"they go after a day": "unused uploads expire after 24 h",
    r"does not keep the contract": "name the file and the rule that it breaks",
    r"see to it that": "use the verb, such as restore",
    r"(?:so many|many) tasks behind": "the state after task n",
    r"what should bring it there": "name the snapshot",
    r"makes none of it": "say what is not made",
    r"hungry": "may have work",
    r"polite word": "polite signal",
    r"last words": "last log lines",
    r"in (?:our|its|their) hands?": "that it holds, or manual",
    r"each rung": "each step of the stop sequence",
    r"may not cry": "must not raise a false alarm",
    r"behind everybody's back": "without any operation",
}
"""Phrases as regular expressions, each with what to write instead. A space matches the end of a line too."""
KNOWN: Mapping[str, int] = {
    "tests/store/earlier_series/postgres/0001_core.sql": 1,
    "tests/store/earlier_series/postgres/0003_lists.sql": 2,
}
BREAK = r"\s+(?:(?:#|--|\*|//)\s*)?"
"""What stands between two words: spaces, or the end of a line and the comment sign of the next."""


def problems(texts: Iterable[tuple[str, str]], known: Mapping[str, int]) -> Iterator[str]:
    """Yield what to change in these files, each a path and its text; and what `known` need not list any more."""
    counts = dict.fromkeys(known, 0)
    for path, text in texts:
        found = [*_modules(path), *_identifiers(path, text), *_phrases(path, text)]
        counts[path] = len(found)
        if len(found) > known.get(path, 0):
            yield from found
    for path, count in known.items():
        if counts[path] < count:
            yield f"{path} has {counts[path]} such words, and KNOWN in scripts/glossary.py says {count}: lower it"


def _modules(path: str) -> Iterator[str]:
    file = Path(path)
    folder, stem = file.parent.as_posix(), file.stem.removeprefix("test_")
    replaced = MODULES[""] | MODULES.get(folder, frozenset())
    if file.suffix in CODE and stem in replaced:
        yield f"{path}: `{stem}` is not a name for a module; see docs/glossary.md"


def _identifiers(path: str, text: str) -> Iterator[str]:
    if not path.endswith(".py"):
        return
    replaced = frozenset[str]().union(*(words for folder, words in IDENTIFIERS.items() if _is_in(path, folder)))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in replaced:
            yield f"{path}:{token.start[0]}: `{token.string}` is not a name for it; see docs/glossary.md"


def _is_in(path: str, folder: str) -> bool:
    return not folder or path.startswith(f"{folder}/")


def _phrases(path: str, text: str) -> Iterator[str]:
    for phrase, better in PHRASES.items():
        for match in re.finditer(rf"\b{phrase.replace(' ', BREAK)}\b", text, re.IGNORECASE):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{path}:{line}: {phrase!r} reads oddly; write: {better}"


def read(root: Path) -> Iterator[tuple[str, str]]:
    inside = (path for folder in FOLDERS for path in (root / folder).rglob("*"))
    paths = [*root.glob("*.md"), *root.glob("*.py"), *inside]
    for path in sorted(paths):
        name = path.relative_to(root).as_posix()
        if path.suffix in SUFFIXES and name not in SELF and path.is_file():
            yield name, path.read_text()


def main() -> None:
    found = list(problems(read(ROOT), KNOWN))
    sys.stdout.writelines(f"{problem}\n" for problem in found)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
