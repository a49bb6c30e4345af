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
    popen = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    cluster.engines["alone"] = Engine("alone", "", popen, Path("log"), None)
    print(popen.pid, flush=True)
    time.sleep(600)
"""


def test_servers_end_with_a_script_that_is_terminated() -> None:
    script = subprocess.Popen([sys.executable, "-c", STARTED], cwd=SCRIPTS, stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None
    server = int(script.stdout.readline())
    script.send_signal(signal.SIGTERM)
    assert script.wait(60) == 128 + signal.SIGTERM
    script.stdout.close()
    with pytest.raises(ProcessLookupError):
        os.kill(server, 0)
