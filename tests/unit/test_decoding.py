"""Structs are read through `holdfast.decoding`, which many threads may call at once."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "holdfast"
THREADS = """
import sys, threading
import msgspec
from holdfast import decoding

sys.setswitchinterval(1e-6)
read = {"decode": lambda kind: decoding.decode('{"last": 1}', kind),
        "convert": lambda kind: decoding.convert({"last": 1}, kind),}[sys.argv[1]]

def first_use(n):
    # Four threads read a struct that nobody has read before.
    parts = [msgspec.defstruct(f"Part{k}", [(f"field{i}", int, 0) for i in range(5)]) for k in range(8)]
    whole = msgspec.defstruct("Whole", [*((f"part{k}", part, None) for k, part in enumerate(parts)), ("last", int, 0)])
    together = threading.Barrier(4)
    found = []
    def use():
        together.wait()
        found.append(read(whole).last)
    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [1] * 4

for n in range(int(sys.argv[2])):
    first_use(n)
"""


def first_uses(how: str, times: int) -> int:
    return subprocess.run([sys.executable, "-c", THREADS, how, str(times)], timeout=120, check=False).returncode


@pytest.mark.parametrize("how", ["decode", "convert"])
def test_threads_may_read_a_struct_for_the_first_time_together(how: str) -> None:
    """A worker reads plans, specs and ends in several threads: none of them may bring the process down."""
    assert first_uses(how, 200) == 0


def test_nothing_else_reads_structs() -> None:
    """Calls that make msgspec describe a type are in `decoding.py` alone."""
    calls = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in sorted(SOURCE.rglob("*.py"))
        if path.name != "decoding.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and _describes_a_type(node)
    ]
    assert calls == []


def _describes_a_type(call: ast.Call) -> bool:
    name = ast.unparse(call.func)
    if name in ("msgspec.convert", "msgspec.json.Decoder", "msgspec.msgpack.Decoder"):
        return bool(call.args or call.keywords)
    typed = any(word.arg == "type" for word in call.keywords)
    return typed and name in ("msgspec.json.decode", "msgspec.msgpack.decode")
