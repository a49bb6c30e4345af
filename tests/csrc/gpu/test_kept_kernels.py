"""The kernels that are kept compiled."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


def test_the_kept_kernels_are_those_of_the_source() -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc to compile the kernels with")
    made = subprocess.run(["bash", str(ROOT / "csrc/cuda/kernels/make.sh")], check=True, capture_output=True, text=True)
    version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True).stdout
    if "release 13.0," not in version:
        pytest.skip("the kept kernels were compiled by nvcc 13.0; another release may order instructions otherwise")
    assert made.stdout == (ROOT / "csrc/cuda/generated/kernels_ptx.cpp").read_text()


def test_the_oldest_driver_that_they_name_takes_the_kept_kernels(tmp_path: Path) -> None:
    """A driver that does not take them says nothing but that: copies go on without, and sums are refused."""
    if shutil.which("ptxas") is None:
        pytest.skip("no ptxas to assemble the kernels with")
    kept = (ROOT / "csrc/cuda/generated/kernels_ptx.cpp").read_text()
    (tmp_path / "kernels.ptx").write_text(kept.split('R"ptx(')[1].split(')ptx"')[0])
    words = ["ptxas", "-v", "-arch=sm_90", "-o", str(tmp_path / "kernels.cubin"), str(tmp_path / "kernels.ptx")]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    stacks = re.findall(r"(\d+) bytes stack frame", done.stderr)
    assert stacks and set(stacks) == {"0"}, f"daemons have no memory for stacks (csrc/cuda/device.h): {done.stderr}"
