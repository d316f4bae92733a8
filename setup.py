"""Compiles the CPU kernels when lce is installed; `setup.cfg` says everything else.

An editable install has the kernels of this processor, a wheel those of all levels.
"""

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

LEVELS = ("v3", "v4", "v4-bf16", "arm64")


class BuildWithKernels(build_py):
    """Setuptools' step that collects the package's files, with the kernels' files made first."""

    def run(self) -> None:
        chosen = () if self.editable_mode else LEVELS
        command = [sys.executable, "-m", "lce.kernels", *chosen]
        try:
            subprocess.run(command, cwd=Path(__file__).parent, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"lce: kernels are not compiled now, but when they are first used: {error}", file=sys.stderr)
        super().run()


setup(cmdclass={"build_py": BuildWithKernels})
