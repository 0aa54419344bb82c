"""The cap of a log: what fits, and the one note where it is cut."""

from holdfast.worker.log_cap import LogCap


def test_what_fits_is_counted_and_the_last_byte_may_be_used() -> None:
    cap = LogCap(10)
    assert cap.fits(4)
    assert cap.fits(6)
    assert (cap.kept, cap.cut) == (10, False)
    assert not cap.fits(1)
    assert (cap.kept, cap.cut) == (10, True)


def test_nothing_is_kept_after_a_cut_even_if_it_would_fit() -> None:
    cap = LogCap(10)
    assert not cap.fits(11)
    assert not cap.fits(1)
    assert cap.kept == 0
    cap.kept = 0
    assert not cap.fits(0)


def test_log_of_earlier_attempts_counts() -> None:
    cap = LogCap(10)
    cap.kept = 8
    assert not cap.fits(3)


def test_cut_is_noted_once() -> None:
    assert [cap.note() for cap in [LogCap(10)] * 2] == ["the log is over 10 bytes; what follows is not kept", None]
    assert LogCap(7, "its events are").note() == "its events are over 7 bytes; what follows is not kept"
