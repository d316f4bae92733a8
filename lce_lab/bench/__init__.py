"""Measures the speed of prefill and decode for some methods and text lengths, and the machine's own limits.

    from lce_lab.bench import bench
    report = bench("demo", ["full", "longheads"], lengths=[512, 2048])
    for row in report.rows: print(row.method, row.length, row.decode.median, row.decode_share)

A `Bench` object measures the same; its `report` can be read at any time, even after Ctrl-C.
"""

from lce_lab.bench.ceilings import Ceilings, machine
from lce_lab.bench.measure import Bench, Report, Row, Spread, StepTimes, Subject, bench

__all__ = ["Bench", "Ceilings", "Report", "Row", "Spread", "StepTimes", "Subject", "bench", "machine"]
