"""The kernels for arm64, which this processor cannot run, pass the tests of kernels in an emulator."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lce.kernels.code import bodies
from tests.kernels.arm64.emulator import CPU, RAN, qemu

ROOT = Path(__file__).parents[3]
FILES = [
    *(f"cpu/test_{name}.py" for name in "attention choices int8_rows numbers panels products quantised".split()),
    *(f"cpu/test_{name}.py" for name in "replay scores threads".split()),
    "test_elementwise.py",
    "test_merging.py",
]
