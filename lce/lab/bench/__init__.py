"""Measures prefill and decode of a model, methods by lengths, beside what the machine itself can do.

    from lce.lab.bench import bench
    report = bench("demo", ["full", "longheads"], lengths=[512, 2048])
    for row in report.rows: print(row.method, row.length, row.decode.median, row.decode_share)

`Bench` is the same in steps: its `report` is there at any time, after Ctrl-C too.
"""

from lce.lab.bench.ceilings import Ceilings, machine
from lce.lab.bench.measure import Bench, Subject, bench
from lce.lab.bench.report import Report, Row, Spread, StepTimes

__all__ = ["Bench", "Ceilings", "Report", "Row", "Spread", "StepTimes", "Subject", "bench", "machine"]
