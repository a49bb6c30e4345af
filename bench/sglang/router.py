"""SGLang's own routers before a pair: what they send to its servers is theirs alone."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from servers import OUT, DidNotStart, Machine

ROUTERS: dict[str, tuple[str, ...]] = {"sglang-router": (), "mini-lb": ("--mini-lb",)}
START_SECONDS, STOP_SECONDS = 60.0, 10.0


@contextmanager
def routed(machine: Machine, name: str) -> Iterator[str]:
    """The URL of a router (`python -m sglang_router.launch_router`) before a pair that is ready. DidNotStart."""
    port = 8119 + 20 * machine.place
    words = [sys.executable, "-m", "sglang_router.launch_router", "--pd-disaggregation", *ROUTERS[name]]
    words += ["--prefill", machine.url("p"), str(machine.bootstrap_port), "--decode", machine.url("d")]
    with (OUT / f"{name}.log").open("w") as log:
        router = subprocess.Popen([*words, "--host", "127.0.0.1", "--port", str(port)], stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(router, url, name)
        yield url
    finally:
        router.terminate()
        try:
            router.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            router.kill()
            router.wait(STOP_SECONDS)


def _wait(router: subprocess.Popen[bytes], url: str, name: str) -> None:
    end = time.monotonic() + START_SECONDS
    while router.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise DidNotStart(f"{name} is not ready:\n" + (OUT / f"{name}.log").read_text(errors="replace")[-2000:])
