"""What `lce calibrate` prints."""

from lce_lab.calibrate import Recall
from lce_lab.terminal import figures


def test_recalls_and_their_mean() -> None:
    head, *rows = figures.recall_lines([Recall(0, 32, 0.5, 0.25), Recall(1, 32, 1.0, 0.75)])
    assert head.endswith("recall of the best 32 tokens")
    assert [row.split() for row in rows] == [
        ["0", "50.0%", "25.0%"],
        ["1", "100.0%", "75.0%"],
        ["mean", "75.0%", "50.0%"],
    ]
