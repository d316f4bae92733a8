"""Learns a model's low-dim maps from text (Wang et al., 2025, Eq. 5-7), and measures their top-k recall.

The text is prefilled in pieces of one window, and the queries and keys of every layer are written to a work folder
beside the map file. Then each layer's two maps are learned from its queries and keys. A calibration that was
interrupted resumes when it is called again, because finished pieces and layers stay in the work folder.
"""

from lce.calibrate.learn import Calibration, Recall, calibrate

__all__ = ["Calibration", "Recall", "calibrate"]
