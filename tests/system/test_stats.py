"""Statistics of real daemons: the command, its forms, and the sums in them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from engines import Engines, settled

from kvferry.daemon.stack import Stack
from kvferry.daemon.stats_main import size
from kvferry.daemon.system import SystemSpec, start_replicas

STATES = ("free", "leased", "arriving", "cached", "spilling", "restoring", "orphaned")


def stats_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvferry", "stats", *words], capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.timeout(90)
def test_the_command_over_tcp_and_unix_socket() -> None:
    with Stack() as stack:
        prefills, decodes = start_replicas(stack, SystemSpec(page_size=16))
        with Engines(prefills[0], decodes[0]) as engines:
            first = engines.turn(list(range(100)), 10)
            assert engines.turn(list(range(100)) + first.output, 10).error is None
        settled(decodes[0])
        for address in (decodes[0].daemon_address, f"unix:{decodes[0].socket}"):
            done = stats_command(address, "--format", "json")
            assert done.returncode == 0, done.stderr
            side = json.loads(done.stdout)["sides"][0]
            assert side["role"] == "ROLE_DECODE"
            pool, requests = side["pool"], side["requests"]
            assert sum(int(pool[state]) for state in STATES) == int(pool["pages"])
            assert int(requests["queried_tokens"]) == 100 + 110
            assert int(requests["hit_tokens"]) == 96
            assert requests["hit_rate"] == pytest.approx(96 / 210)
            assert requests["recent_hit_rate"] == pytest.approx(96 / 210)
            assert int(side["admit_to_ready"]["count"]) == 2
            assert side["admit_to_ready"]["p99_ms"] >= side["admit_to_ready"]["p50_ms"] > 0
        table = stats_command(decodes[0].daemon_address)
        assert table.returncode == 0
        assert "45.7%" in table.stdout
        both = stats_command(prefills[0].daemon_address)
        assert "(prefill)" in both.stdout


def test_no_daemon_is_said_so() -> None:
    done = stats_command("127.0.0.1:1")
    assert done.returncode == 1
    assert "UNAVAILABLE" in done.stderr
    assert stats_command("nowhere").returncode == 2


def test_sizes_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 << 20, 3 << 40)] == ["0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3.0 TiB"]
