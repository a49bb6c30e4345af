"""bench/vllm's clusters of servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "bench" / "vllm"
STARTED = """
import subprocess, sys, time
from pathlib import Path
from cluster import Cluster, Engine, Spec
with Cluster(Spec()) as cluster:
    for name in ("prefill", "decode"):
        popen = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
        cluster.engines[name] = Engine(name, "", popen, Path("log"), None)
    time.sleep(600)
"""
SERVER = """
import os, signal, sys, time
def end(*_):
    os.write(1, b"ends\\n")
    time.sleep(2)
    os._exit(0)
signal.signal(signal.SIGTERM, end)
os.write(1, f"{os.getpid()}\\n".encode())
time.sleep(600)
"""


def test_servers_end_with_a_script_that_is_terminated_and_terminated_again() -> None:
    words = [sys.executable, "-c", STARTED, SERVER]
    script = subprocess.Popen(words, cwd=SCRIPTS, stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None
    servers = [int(script.stdout.readline()) for _ in range(2)]
    script.send_signal(signal.SIGTERM)
    assert script.stdout.readline() == "ends\n"
    script.send_signal(signal.SIGTERM)
    assert script.wait(60) == 128 + signal.SIGTERM
    for server in servers:
        with pytest.raises(ProcessLookupError):
            os.kill(server, 0)
    script.stdout.close()
