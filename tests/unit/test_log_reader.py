"""Bytes are split into lines, independent of the chunks they come in and of where a reader resumes."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from holdfast.worker.log_reader import MAX_LINE, LineSplitter, as_event


def fed(data: bytes, cuts: list[int], start: int = 0) -> tuple[list[bytes], int]:
    """Feed bytes in pieces; return the lines and where they end."""
    lines = LineSplitter(start)
    found: list[bytes] = []
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for begin, end in itertools.pairwise(edges):
        new, missing = lines.feed(start + begin, data[begin:end])
        assert missing == 0
        found += new
    return found + lines.rest(), lines.end


texts = st.lists(st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"")), max_size=8).map(b"\n".join)


@given(texts, st.lists(st.integers(0, 500), max_size=6))
def test_lines_do_not_depend_on_the_pieces(data: bytes, cuts: list[int]) -> None:
    """Proves R10."""
    expected = data.split(b"\n")
    if expected[-1] == b"":
        expected.pop()
    assert fed(data, cuts) == (expected, len(data))


@given(texts, st.lists(st.integers(0, 500), max_size=4), st.integers(0, 200))
def test_a_reader_that_begins_again_at_a_line_end_misses_and_repeats_nothing(
    data: bytes, cuts: list[int], stop: int
) -> None:
    """What an adopter does. Proves R3, R10."""
    whole, _ = fed(data, [])
    first = LineSplitter(0)
    before, _ = first.feed(0, data[:stop])
    after, _ = fed(data[first.end :], cuts, first.end)
    assert before + after == whole


def test_a_line_without_an_end_is_cut_between_characters_always_at_the_same_place() -> None:
    """Proves R10."""
    data = ("x" + "ü" * 100_000).encode()
    for step in (1000, 4096, 65_536, 300_000):
        lines, end = fed(data, list(range(0, len(data), step)))
        assert end == len(data)
        assert b"".join(lines) == data
        assert all(len(line) <= MAX_LINE for line in lines)
        assert "".join(line.decode() for line in lines) == data.decode()
        assert [len(line) for line in lines][:2] == [MAX_LINE - 1, MAX_LINE]


def test_gap_in_the_log_is_reported_and_ends_a_line() -> None:
    lines = LineSplitter(0)
    assert lines.feed(0, b"one\ntw") == ([b"one"], 0)
    assert lines.feed(100, b"rest\n") == ([b"tw", b"rest"], 94)
    assert lines.end == 105


def test_only_objects_with_a_name_of_their_own_are_events() -> None:
    """Proves R11."""
    event = as_event(b'{"event":"progress","percent":5}')
    assert event is not None
    assert (event.type, event.data) == ("progress", {"percent": 5})
    for line in (
        b'["event"]',
        b'{"event":null}',
        b'{"event":""}',
        b'{"event":"lease"}',
        b'{"event":"usage","tokens":-1}',
        b'{"event":"usage","tokens":true}',
        b'{"event":"' + b"x" * 65 + b'"}',
        b'{"event":"a\\nb"}',
        b'{"event":"x"',
        b'{"event":"\xff"}',
        b"[" * 100_000 + b'"event"',
    ):
        assert as_event(line) is None, line[:40]
