"""What the processes of ranks are forked from: SGLang is imported and hooked, once for all of them."""

from __future__ import annotations

import os

from tests.connectors.sglang import sglang_on_cpu

if "sglang" not in __import__("sys").modules:
    sglang_on_cpu.load(os.environ["SGLANG_VERSION"])

from sglang.srt.disaggregation import decode, prefill  # noqa: E402, F401

from tests.connectors.sglang import rank_process  # noqa: E402, F401
from tests.connectors.sglang.rig import hooked  # noqa: E402

hooked()
