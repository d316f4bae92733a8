"""Learns the maps by which `esa` makes queries and keys low-dimensional, and measures the maps' top-k recall.

The maps are those of Wang et al., 2025, Eq. 5-7. A text is prefilled in pieces of one window, or of several, and the
queries and keys of every layer are written to a work folder beside the map file. Then each layer's two maps are learned
from them. An interrupted calibration resumes when it is called again: finished pieces and layers stay.
"""

from lce_lab.calibrate.learn import Calibration, Recall, calibrate

__all__ = ["Calibration", "Recall", "calibrate"]
