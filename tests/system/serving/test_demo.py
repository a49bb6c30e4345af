"""`kvferry demo`, with synthetic workers: what it shows, and that it fails where it does not show it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request

import pytest

ADDRESS_SECONDS = 30.0
DEMO = [sys.executable, "-m", "kvferry", "demo", "--synthetic", "--conversations", "2", "--turns", "2"]


def shown(*words: str) -> str:
    done = subprocess.run([*DEMO, *words], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"\s+", " ", done.stdout)


@pytest.mark.timeout(240)
def test_bytes_a_restarted_worker_and_an_evicted_prefix() -> None:
    text = shown()
    assert re.search(r"bytes moved over NIXL │ [\d.]+ \w+ │ [\d.]+ \w+ │ \d", text)
    assert "pages moved" in text and "decode-side hit rate" in text
    assert re.search(r"Of 4 prompts the decode daemon held \d+% and said so: .* crossed the wire in place of", text)
    assert re.search(r"every byte of the [1-9]\d* pages that moved, and of those held: none was wrong", text)
    assert "TTFT" not in text and "latency" not in text  # noise, on two cores
    _, restarted, evicted = re.split(r"The decode worker is restarted|Other prompts fill all \d+ pages", text)
    held, moved, whole = map(
        int, *re.findall(r"(\d+) held by the decode daemon, (\d+) of (\d+) pages moved", restarted)
    )
    assert held > 0 and moved < whole
    again = re.search(
        r"(\d+) held by the decode daemon \((\d+) in its host tier\), (\d+) of (\d+) pages moved", evicted
    )
    assert again is not None, evicted
    held, host, moved, whole = map(int, again.groups())
    assert 0 < host <= held and moved < whole


@pytest.mark.timeout(240)
@pytest.mark.nightly
def test_times_for_who_asks_and_no_eviction_without_a_host_tier() -> None:
    text = shown("--times", "--host-bytes", "0")
    assert "TTFT p50" in text and "inter-token latency" in text
    assert "No prefix is evicted here: that takes a --host-bytes of the pool's size" in text
    assert "host tier)" not in text


@pytest.mark.timeout(240)
def test_the_live_pages_address_comes_first_and_answers() -> None:
    begun = time.monotonic()
    with subprocess.Popen([*DEMO, "--turns", "8"], stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        try:
            told = next(found[1] for line in demo.stdout if (found := re.search(r"watch it at (http://\S+)", line)))
            assert time.monotonic() - begun <= ADDRESS_SECONDS
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            assert b"<title>kvferry</title>" in opener.open(told, timeout=10).read()
        finally:
            demo.terminate()
            demo.communicate(timeout=120)
    assert demo.returncode == 128 + 15
