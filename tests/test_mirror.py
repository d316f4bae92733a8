"""Tests mirror the package: each file of lce/ has a test file at its own path, or is covered by a named one."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parent.parent
COVERED = {  # a file of lce/, and the file of tests/ that tests it
    "__init__.py": "test_package.py",
    "__main__.py": "test_cli.py",
    "attention/__init__.py": "test_architecture.py",
    "cache/disk.py": "cache/test_tiers.py",
    "cache/pages.py": "cache/test_tiers.py",
    "cache/pool.py": "cache/test_tiers.py",
    "cache/slots.py": "cache/test_tiers.py",
    "cache/tier.py": "cache/test_tiers.py",
    "bench/__init__.py": "bench/test_measure.py",
    "calibrate/__init__.py": "calibrate/test_learn.py",
    "attention/compiled.py": "attention/test_attention.py",
    "attention/flash.py": "attention/test_attention.py",
    "attention/reference.py": "attention/test_attention.py",
    "kernels/__init__.py": "kernels/test_compiling.py",
    "attention/runs.py": "attention/test_attention.py",
    "kernels/rows.py": "kernels/test_attention.py",
    "kernels/cuda/rows.py": "kernels/cuda/test_attention.py",
    "cache/layer.py": "cache/test_kv.py",
    "engine/job.py": "engine/test_saving.py",
    "engine/runner.py": "engine/test_engine.py",
    "methods/__init__.py": "test_package.py",
    "methods/budgeted.py": "methods/test_oracle.py",
    "methods/placement.py": "methods/test_matrix.py",
    "methods/rerope.py": "methods/test_matrix.py",
    "methods/self_extend.py": "methods/test_matrix.py",
    "methods/step.py": "methods/test_run.py",
    "methods/streaming.py": "methods/test_matrix.py",
    "version.py": "test_package.py",
    "weights/saving.py": "engine/test_quantising.py",
    "models/fields.py": "models/test_config.py",
    "eval/naming.py": "eval/test_report.py",
    "eval/spelling.py": "eval/test_record.py",
    "eval/sample.py": "eval/tasks/test_making.py",
    "eval/metrics/__init__.py": "eval/metrics/test_plain.py",
    "eval/reproduce/__init__.py": "eval/reproduce/test_entry.py",
    "eval/reproduce/dca.py": "eval/reproduce/test_reproduce.py",
    "eval/reproduce/esa.py": "eval/reproduce/test_reproduce.py",
    "eval/reproduce/longheads.py": "eval/reproduce/test_reproduce.py",
    "eval/published/__init__.py": "eval/published/test_suites.py",
    "eval/published/base.py": "eval/published/test_suites.py",
    "eval/published/counting_stars.py": "eval/published/test_suites.py",
    "eval/published/haystack.py": "eval/published/test_suites.py",
    "eval/published/infinitebench.py": "eval/published/test_suites.py",
    "eval/published/leval.py": "eval/published/test_suites.py",
    "eval/published/longbench.py": "eval/published/test_suites.py",
    "eval/published/longbench_v2.py": "eval/published/test_suites.py",
    "eval/published/needlebench.py": "eval/published/test_suites.py",
    "eval/published/reading.py": "eval/published/test_suites.py",
    "eval/published/ruler.py": "eval/published/test_suites.py",
    "eval/published/running.py": "terminal/test_published.py",
    "eval/published/scoring.py": "terminal/test_published.py",
    "eval/tasks/__init__.py": "eval/tasks/test_tasks.py",
    "eval/tasks/base.py": "eval/tasks/test_tasks.py",
    "eval/tasks/chains.py": "eval/tasks/test_tasks.py",
    "eval/tasks/keys.py": "eval/tasks/test_tasks.py",
    "eval/tasks/lists.py": "eval/tasks/test_tasks.py",
}


def files() -> set[str]:
    """The files of lce/ that hold something."""
    package = ROOT / "lce"
    return {path.relative_to(package).as_posix() for path in package.rglob("*.py") if path.stat().st_size}


def own_test(file: str) -> Path:
    path = Path(file)
    return ROOT / "tests" / path.parent / f"test_{path.name}"


def test_every_file_has_its_tests() -> None:
    assert {file for file in files() if not own_test(file).exists()} == set(COVERED)


def test_the_files_named_exist() -> None:
    assert all((ROOT / "tests" / test).exists() for test in COVERED.values())
