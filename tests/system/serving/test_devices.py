"""Devices of pools that commands of these tests start, and what the demo says of GPUs that are not there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvferry._core import GpuUnavailable, gpu_device_count
from tests.support.devices import placed


def test_commands_get_their_devices() -> None:
    serve = ["serve", "--role", "decode"]
    assert placed(serve, ()) == serve
    assert placed(serve, (0, 1)) == [*serve, "--device", "cuda:1"]
    assert placed(["serve", "--role", "prefill"], (0, 1))[-1] == "cuda:0"
    assert placed([*serve, "--ranks", "2"], (0, 1))[-1] == "cuda:0,cuda:1"
    assert placed([*serve, "--device", "cuda:5"], (0, 1))[-1] == "cuda:5"
    assert placed(["worker", "decode", "--model", "x"], (0, 1))[-1] == "cuda:1"
    assert "--device" not in placed(["worker", "decode", "--synthetic"], (0, 1)) + placed(["front"], (0, 1))
    with pytest.raises(pytest.skip.Exception, match="4 ranks on 2 devices"):
        placed([*serve, "--ranks", "4"], (0, 1))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--device", "cuda:0,cuda:1,cuda:2"], "of 3 GPUs; it takes 1 or 2"),
        (["--device", "cuda:0", "--decode-ranks", "2"], "are for --device cpu"),
        (["--device", "gpu"], "device is 'gpu'"),
        (["--device", "cuda:63"], "63"),
    ],
)
def test_the_demo_says_what_is_wrong_with_a_device(words: list[str], complaint: str) -> None:
    command = [sys.executable, "-m", "kvferry", "demo", "--synthetic", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert complaint in done.stderr


def test_the_demo_without_cuda() -> None:
    try:
        gpu_device_count()
    except GpuUnavailable:
        command = [sys.executable, "-m", "kvferry", "demo", "--device", "cuda:0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert "--device is cuda:0, but CUDA is not here" in done.stderr
    else:
        pytest.skip("CUDA is here")
