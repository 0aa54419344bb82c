"""Write `requirements/*.txt`, which `make setup` and `make up` install, with the hash of every wheel.

`constraints.txt` decides the versions. Which of them each file needs is read from the metadata of the packages that are
installed here, for every supported Python; the hashes are those that the configured package index publishes. No address
of an index or a file is written down: an installation uses its own.
"""

import html.parser
import os
import re
import subprocess
import sys
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "requirements"
CONSTRAINTS = ROOT / "constraints.txt"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
HEADER = "# Made from constraints.txt by `make requirements`: {}, with the hashes of all wheels.\n"
PURPOSES = {
    "run": "what holdfast needs to run, with containers and uvloop, and to be installed",
    "dev": "what it takes to work on holdfast",
    "zig": "a compiler for the supervisor, where the machine has none",
}
Needs = Mapping[str, frozenset[str]]
"""Packages by canonical name, each with the Pythons that it is needed on."""


def pins(text: str) -> dict[str, Requirement]:
    """The versions that `constraints.txt` decides, by canonical name."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    found = [Requirement(line) for line in lines if line]
    return {canonicalize_name(one.name): one for one in found}


def roots() -> Mapping[str, Sequence[Requirement]]:
    """What each file begins with, and what for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    run = [
        *project["build-system"]["requires"],
        *project["project"]["dependencies"],
        *extras["docker"],
        *extras["fast"],
    ]
    named = {"run": run, "dev": [*run, *extras["dev"]], "zig": ["ziglang"]}
    return {name: [Requirement(line) for line in lines] for name, lines in named.items()}


def needs(begin: Iterable[Requirement]) -> Needs:
    """Everything that these need, directly or not, by the metadata of what is installed."""
    found: dict[str, set[str]] = {}
    for python in PYTHONS:
        for machine in MACHINES:
            for name in _closure(begin, _environment(python, machine)):
                found.setdefault(name, set()).add(python)
    return {name: frozenset(pythons) for name, pythons in sorted(found.items())}


def _environment(python: str, machine: str) -> dict[str, str]:
    return {
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": machine,
        "platform_python_implementation": "CPython",
        "platform_system": "Linux",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }


def _closure(begin: Iterable[Requirement], environment: Mapping[str, str]) -> set[str]:
    seen: set[tuple[str, str]] = set()
    waiting = [(one, "") for one in begin]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({**environment, "extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                waiting += [(Requirement(line), wanted) for line in metadata.requires(name) or ()]
    return {name for name, _ in seen}


def hashes(name: str, version: str) -> Sequence[str]:
    """The hashes of the wheels of one version that a supported Python can use, on any platform."""
    found = []
    for file, digest in _files(name):
        try:
            _, of, _, tags = parse_wheel_filename(file)
        except InvalidWheelFilename:
            continue  # A source archive would be built with tools that nobody hashed.
        if str(of) == version and any(_usable(tag.interpreter, tag.abi) for tag in tags):
            found.append(digest)
    if not found:
        raise SystemExit(f"the package index has no wheel of {name} {version} with a hash")
    return sorted(found)


def _usable(interpreter: str, abi: str) -> bool:
    if abi == "none":
        return interpreter.startswith("py3")
    number = re.fullmatch(r"cp3(\d+)", interpreter)
    if number is None:
        return False
    newest = int(PYTHONS[-1].partition(".")[2])
    return int(number[1]) <= newest if abi == "abi3" else f"3.{number[1]}" in PYTHONS and abi == interpreter


def _files(name: str) -> Iterator[tuple[str, str]]:
    """The files of a package with their SHA-256, as its page in the index links them."""
    request = urllib.request.Request(f"{_index()}/{name}/", headers={"Accept": "text/html"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        page = answer.read().decode()
    links = _Links()
    links.feed(page)
    for link in links.found:
        path, _, fragment = link.partition("#")
        algorithm, _, digest = fragment.partition("=")
        if algorithm == "sha256":
            yield urllib.parse.unquote(path.rpartition("/")[2]), digest


class _Links(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def _index() -> str:
    """The index that pip uses: the one that is configured, else its own."""
    asked = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True, text=True, check=False
    )
    if found := os.environ.get("PIP_INDEX_URL") or asked.stdout.strip():
        return found.rstrip("/")
    own = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
    return subprocess.check_output([sys.executable, "-c", own], text=True).strip().rstrip("/")


def marker(pythons: frozenset[str]) -> str:
    """The condition on Python under which a package is needed; nothing if it always is."""
    if pythons == frozenset(PYTHONS):
        return ""
    first, last = (PYTHONS.index(edge(pythons, key=PYTHONS.index)) for edge in (min, max))
    conditions = [f'python_version >= "{PYTHONS[first]}"'] if first else []
    conditions += [f'python_version < "{PYTHONS[last + 1]}"'] if last + 1 < len(PYTHONS) else []
    return " ; " + " and ".join(conditions)


def render(name: str, needed: Needs, pinned: Mapping[str, Requirement], known: Mapping[str, Sequence[str]]) -> str:
    """The text of one file; `dev` begins with all of `run`."""
    parts = [HEADER.format(PURPOSES[name]), "-r run.txt\n" if name == "dev" else ""]
    for package, pythons in needed.items():
        lines = [f"{pinned[package]}{marker(pythons)}", *(f"    --hash=sha256:{one}" for one in known[package])]
        parts.append(" \\\n".join(lines) + "\n")
    return "".join(parts)


def main() -> None:
    pinned = pins(CONSTRAINTS.read_text())
    files = {name: needs(begin) for name, begin in roots().items()}
    wanted = sorted(set().union(*files.values()))
    if missing := [name for name in wanted if name not in pinned]:
        raise SystemExit(f"constraints.txt has no version of {', '.join(missing)}: add one")
    with ThreadPoolExecutor(8) as pool:
        versions = [str(pinned[name].specifier).removeprefix("==") for name in wanted]
        known = dict(zip(wanted, pool.map(hashes, wanted, versions), strict=True))
    FOLDER.mkdir(exist_ok=True)
    files["dev"] = {name: pythons for name, pythons in files["dev"].items() if name not in files["run"]}
    for name, needed in files.items():
        (FOLDER / f"{name}.txt").write_text(render(name, needed, pinned, known))
        sys.stdout.write(f"requirements/{name}.txt: {len(needed)} packages\n")
    if spare := sorted(pinned.keys() - set(wanted)):
        sys.stdout.write(f"in constraints.txt, and needed by nothing: {', '.join(spare)}\n")


if __name__ == "__main__":
    main()
