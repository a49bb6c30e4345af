"""Devices of these tests' pools: shared memory, or the GPUs of the variable TEST_DEVICES.

TEST_DEVICES=cuda:0,cuda:1 pytest tests/system tests/faults     prefill on the first, decode on the last
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from kvferry._core import GpuUnavailable, gpu_device_count
from kvferry.daemon.cli.stack import Process, Stack
from kvferry.daemon.config.values import parse_device

VARIABLE = "TEST_DEVICES"
# More than a daemon's 64: a session's end leaves its ports in TIME-WAIT for a minute, and tests end many a minute.
UCX_PORTS = range(23000, 24000)


def chosen() -> tuple[int, ...]:
    """Empty: shared memory. Skips where they are not here."""
    devices = parse_device(os.environ.get(VARIABLE) or "cpu")
    if devices:
        need(*devices)
    return devices


def need(*devices: int) -> None:
    """Skips where they are not here."""
    wanted = 1 + max(devices)
    try:
        found = gpu_device_count()
    except GpuUnavailable as error:
        pytest.skip(f"needs {wanted} GPUs: {error}")
    if found < wanted:
        pytest.skip(f"needs {wanted} GPUs; there are {found}")


class DeviceStack(Stack):
    """A stack whose daemons' pools, and whose workers' models, are on the test's devices where nothing else is said."""

    def start(
        self,
        name: str,
        words: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> Process:
        ports = {"KVFERRY_UCX_PORTS": f"{UCX_PORTS[0]}-{UCX_PORTS[-1]}"}
        return super().start(name, placed(words, chosen()), environment=ports | (environment or {}), prefix=prefix)


class WrappedStack(DeviceStack):
    """One of its processes is started by another command, which its own follows."""

    def __init__(self, name: str, prefix: Sequence[str], environment: dict[str, str] | None = None) -> None:
        super().__init__()
        self._name, self._prefix, self._environment = name, prefix, environment

    def start(
        self,
        name: str,
        words: Sequence[str],
        *,
        environment: dict[str, str] | None = None,
        prefix: Sequence[str] = (),
    ) -> Process:
        if name == self._name:
            prefix, environment = self._prefix, {**(environment or {}), **(self._environment or {})}
        return super().start(name, words, environment=environment, prefix=prefix)


def placed(words: Sequence[str], devices: Sequence[int]) -> list[str]:
    """A command of kvferry with --device, where it takes one. Skips where there are fewer devices than ranks."""
    if not devices or "--device" in words:
        return list(words)
    if words[0] == "serve":
        ranks = int(_value(words, "--ranks") or 1)
        if ranks > len(devices):
            pytest.skip(f"{ranks} ranks on {len(devices)} devices")
        own = devices[:ranks] if ranks > 1 else [_device_of(_value(words, "--role"), devices)]
        return [*words, "--device", ",".join(f"cuda:{each}" for each in own)]
    if words[0] == "worker" and ("--model" in words or "--random-weights" in words):
        return [*words, "--device", f"cuda:{_device_of(words[1], devices)}"]
    return list(words)


def _device_of(role: str, devices: Sequence[int]) -> int:
    return devices[-1] if role == "decode" else devices[0]


def _value(words: Sequence[str], flag: str) -> str:
    return words[words.index(flag) + 1] if flag in words else ""
