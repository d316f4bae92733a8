"""Measures the speed of prefill and decode for some methods and text lengths, and the machine's own limits."""

from lce_lab.bench.ceilings import Ceilings, machine
from lce_lab.bench.measure import Bench, Report, Row, Spread, StepTimes, Subject, bench

__all__ = ["Bench", "Ceilings", "Report", "Row", "Spread", "StepTimes", "Subject", "bench", "machine"]
