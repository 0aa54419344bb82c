"""Whatever is in its folder, the supervisor neither crashes nor hangs: fuzzed against a build with sanitizers.

A few seconds by default; HOLDFAST_FUZZ_EXAMPLES asks for more. Without a C compiler the build is zig's, which has the
undefined-behaviour sanitizer alone.
"""

import itertools
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from holdfast.runner.supervisor import build
from holdfast.runner.wire import Command, SupervisorSpec, WireService, WireTask, encode_command, encode_spec
from tests.support.supervisor_harness import SupervisedAttempt, eventually

EXAMPLES = int(os.environ.get("HOLDFAST_FUZZ_EXAMPLES", "60"))
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="HOLDFAST_FUZZ_EXAMPLES" not in os.environ,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
OPTIONS = {"ASAN_OPTIONS": "detect_leaks=1:exitcode=99", "UBSAN_OPTIONS": "halt_on_error=1:exitcode=99"}
TOKEN = 1 << 40


@pytest.fixture(scope="module")
def sanitized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The supervisor with the sanitizers that the compiler here has."""
    target = tmp_path_factory.mktemp("sanitized") / "holdfast-supervisor"
    strict = ["-std=gnu11", "-g", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Werror", "-fno-sanitize-recover=all"]
    if gcc := shutil.which("cc") or shutil.which("gcc") or shutil.which("clang"):
        command = [gcc, *strict, "-fsanitize=address,undefined"]
    elif zig := build.zig_compiler():
        sys.stderr.write("no C compiler: zig's build, with the undefined-behaviour sanitizer alone\n")
        command = [*zig, *strict, "-fsanitize=undefined"]
    else:
        pytest.fail("no compiler for the sanitizers: install Debian's gcc, or `pip install ziglang`")
    build.write_protocol(target.parent)
    subprocess.run([*command, "-I", target.parent, "-o", target, *build.SOURCES], check=True)
    return target


def record(key: bytes, value: bytes) -> bytes:
    return b"%s %d\n%s\n" % (key, len(value), value)


numbers = st.one_of(
    st.integers(-2, 2**65).map(str), st.sampled_from(["", "0", "01", "+1", "0x1", "1e9", " 1", str(2**63 - 1)])
)
values = st.one_of(
    numbers.map(str.encode), st.binary(max_size=40), st.sampled_from([b"/", b"A=b", b"=", b"a=" * 99, b"\0"])
)
SPEC_KEYS = (
    "token mark env cwd umask uid gid groups limit output_cap timeout idle_timeout stop_grace drain clock start_by"
    " stop_after no_new_privs hold service stop_signal task end"
)
spec_keys = st.sampled_from([*SPEC_KEYS.encode().split(), b"", b"x y"])
COMMAND_KEYS = b"token verb kind grace stop_after clock task name text end"
command_keys = st.sampled_from([*COMMAND_KEYS.split(), b"", b"z" * 70])
WORDS = b"hold beat stop kill go place service start cancel interrupt boottime realtime 0 1 new"
words = st.sampled_from([*WORDS.split(), str(TOKEN).encode()])
# Only this program is ever run: a record of the fuzzer's own never names one.
program = st.sampled_from([record(b"arg", b"/bin/true"), record(b"arg", b"/no/such/program")])


def bent(data: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Cut, doubled, with one byte changed, or as they are."""

    def bend(whole: bytes, at: int, byte: int, how: str) -> bytes:
        at %= max(len(whole), 1)
        match how:
            case "cut":
                return whole[:at]
            case "change":
                return whole[:at] + bytes([byte]) + whole[at + 1 :]
            case "double":
                return whole + whole[at:]
        return whole

    return st.builds(
        bend, data, st.integers(0, 1 << 16), st.integers(0, 255), st.sampled_from(["cut", "change", "double", ""])
    )


def records(title: bytes, keys: st.SearchStrategy[bytes], values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    some = st.lists(
        st.one_of(st.builds(record, keys, values), program if title == b"holdfast-spec" else st.nothing()), max_size=12
    )
    return some.map(lambda parts: title + b" 1\n" + b"".join(parts) + b"end 0\n\n")


good_spec = encode_spec(
    SupervisorSpec(
        token=TOKEN,
        mark="fuzz",
        tasks=(
            WireTask(name="a", argv=("/bin/true",), env={"A": "b"}, timeout=1),
            WireTask(name="b", argv=("/bin/true", "x")),
        ),
        env={"A": "c", "B": "d"},
        cwd="/",
        limits={"nofile": 100},
        output_cap=10,
        timeout=5,
        stop_grace=0.1,
    )
)
good_commands = [
    encode_command(Command(token=TOKEN, verb="beat", stop_after=1e12, clock="realtime")),
    encode_command(Command(token=TOKEN, verb="hold")),
    encode_command(Command(token=1, verb="stop", kind="interrupt", grace=3)),
    encode_command(Command(token=TOKEN, verb="go", task=0)),
    encode_command(Command(token=TOKEN, verb="place", name="new")),
    encode_command(Command(token=TOKEN, verb="service", kind="start")),
    encode_command(Command(token=TOKEN, verb="service", kind="stop")),
]
specs = st.one_of(st.binary(max_size=200), records(b"holdfast-spec", spec_keys, values), bent(st.just(good_spec)))
commands = st.one_of(
    st.binary(max_size=200),
    records(b"holdfast-command", command_keys, st.one_of(words, values)),
    bent(st.sampled_from(good_commands)),
)
folders = itertools.count()


def fresh(tmp_path: Path, program: Path) -> SupervisedAttempt:
    return SupervisedAttempt(tmp_path / str(next(folders)), program)


def assert_sound(attempt: SupervisedAttempt) -> None:
    complaints = attempt.complaints.read_text()
    assert "Sanitizer" not in complaints, complaints
    assert "runtime error" not in complaints, complaints


@FUZZ
@given(data=specs)
def test_any_spec_ends_with_a_record_or_a_clean_exit(sanitized: Path, tmp_path: Path, data: bytes) -> None:
    """Proves R24."""
    attempt = fresh(tmp_path, sanitized)
    (attempt.folder.path / "spec").write_bytes(data)
    attempt.supervise(env=OPTIONS)
    status = attempt.status()
    assert_sound(attempt)
    assert (attempt.folder.exit() is not None) == (status != 123)
    assert status in (0, 1, 123, 124, 125)
    attempt.clean()


SERVICE = WireService(name="server", argv=("/bin/sleep", "600"))


@FUZZ
@given(batch=st.lists(commands, min_size=10, max_size=20), hold=st.booleans())
def test_supervisor_survives_any_commands(sanitized: Path, tmp_path: Path, batch: list[bytes], hold: bool) -> None:
    """Proves R24: each is answered or, if a good one ended the attempt, the end is recorded."""
    attempt = fresh(tmp_path, sanitized)
    attempt.write("/bin/sleep", "600", token=TOKEN, hold=hold, service=SERVICE if hold else None)
    (attempt.folder.path / "space" / "new").mkdir(parents=True)
    attempt.supervise(env=OPTIONS)
    eventually(attempt.folder.started)
    for number, data in enumerate(batch):
        (attempt.folder.path / "cmd" / f"{number:04d}").write_bytes(data)
    # Above every token of the fuzzer that a record can hold.
    last = attempt.folder.send(Command(token=2**63 - 1, verb="kill"))
    eventually(lambda: attempt.folder.exit() or any(ack.command == last for ack in attempt.folder.acks()))
    status = attempt.status()
    assert_sound(attempt)
    assert status in (124, 125, 128 + 9, 128 + 15)
    attempt.clean()
