"""The stages of `benchmarks/gpu.py`, one module each: `run(setup)` measures and records."""
