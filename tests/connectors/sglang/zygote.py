"""What the processes of ranks are forked from: SGLang is imported and hooked, once for all of them."""

from __future__ import annotations

import os
import sys
from importlib import import_module

from tests.connectors.sglang import sglang_on_cpu

if "sglang" not in sys.modules:
    sglang_on_cpu.load(os.environ["SGLANG_VERSION"])
for name in ("sglang.srt.disaggregation.decode", "sglang.srt.disaggregation.prefill"):
    import_module(name)
import_module("tests.connectors.sglang.rank_process")
import_module("tests.connectors.sglang.rig").hooked()
