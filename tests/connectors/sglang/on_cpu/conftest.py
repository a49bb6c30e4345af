"""Tests of SGLang's real classes. They run in a process of their own, which has one version of SGLang: see
../test_with_sglang.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.connectors.sglang import sglang_on_cpu

VERSION = os.environ.get("SGLANG_VERSION", "")
collect_ignore_glob = [] if VERSION else ["check_*.py"]

if VERSION:
    sglang_on_cpu.load(VERSION)


@pytest.fixture(scope="session")
def sglang() -> str:
    """The version of SGLang, which is imported and hooked."""
    from tests.connectors.sglang.rig import hooked

    hooked()
    return VERSION


@pytest.fixture(scope="session")
def one_rank(sglang: str) -> Iterator[None]:
    """One rank of SGLang, of a version that was run, has its surroundings."""
    from kvferry.connectors.sglang.versions import RUN
    from tests.connectors.sglang.rig import prepared

    if sglang not in RUN:
        pytest.skip(f"SGLang {sglang} is known by its interfaces alone")
    with ExitStack() as patches:
        prepared(patches)
        yield
