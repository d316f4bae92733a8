"""Learns a model's low-dim maps from text (Wang et al., 2025, Eq. 5-7), and measures their top-k recall.

The text is prefilled in pieces of one window, and the queries and keys of every layer are written to a work folder
beside the map file. Then the two maps of each layer are learned from them. Finished pieces and layers stay in the work
folder, so that an interrupted calibration resumes when it is called again.
"""

from lce.calibrate.learn import Calibration, Recall, calibrate

__all__ = ["Calibration", "Recall", "calibrate"]
