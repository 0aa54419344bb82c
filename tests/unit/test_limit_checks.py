"""How often an attempt's folder is measured."""

import pytest

from holdfast.worker.limit_checks import FASTEST, LONGEST_SECONDS, SHARE, WATCH_SECONDS, pause_after


@pytest.mark.parametrize(
    ("left", "took", "pause"),
    [
        (0, 0.0, WATCH_SECONDS),
        (FASTEST, 0.0, WATCH_SECONDS),
        (5 * FASTEST, 0.0, 5.0),
        (1000 * FASTEST, 0.0, LONGEST_SECONDS),
        (0, 3.0, 3.0 * SHARE),
    ],
)
def test_folder_far_below_its_limit_is_measured_less_often(left: int, took: float, pause: float) -> None:
    """Not before it can be over the limit, at the fastest rate; and never with more than a share of the time."""
    assert pause_after(1000, 1000 + left, took=took) == pause
