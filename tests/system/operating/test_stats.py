"""Statistics of real daemons: the command, its forms, and the sums in them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.request

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvferry.daemon.cli.stack import Stack, lasting_port
from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.cli.system import Replica, start_replicas
from kvferry.daemon.config.values import size
from kvferry.daemon.observe.metrics import families
from tests.support.engines import Engines, settled
from tests.support.stacks import SmallSystem

STATES = ("free", "leased", "arriving", "cached", "spilling", "restoring", "orphaned")


def stats_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvferry", "stats", *words], capture_output=True, text=True, timeout=30, check=False
    )


@pytest.mark.timeout(90)
def test_the_command_over_tcp_and_unix_socket() -> None:
    with Stack() as stack:
        prefills, decodes = start_replicas(stack, SmallSystem(page_size=16))
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
        agrees_with_metrics(decodes[0])
        table = stats_command(decodes[0].daemon_address)
        assert table.returncode == 0
        assert "45.7%" in table.stdout
        both = stats_command(prefills[0].daemon_address)
        assert "(prefill)" in both.stdout


def agrees_with_metrics(replica: Replica) -> None:
    """The endpoint shows what the gRPC statistics show: nothing moves, so two snapshots are equal."""
    with grpc.insecure_channel(replica.daemon_address, [("grpc.enable_http_proxy", 0)]) as channel:
        told = fetch(channel)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{told.metrics}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    shown = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    compared = 0
    for family in families(told):
        if any(word in family.name for word in ("uptime", "event_loop", "rpc_seconds")):
            continue
        for sample in family.samples:
            assert shown[(sample.name, *sorted(sample.labels.items()))] == sample.value, sample
            compared += 1
    assert compared > 80
    assert shown["kvferry_lookup_tokens_total", ("role", "decode")] == 210
    assert shown["kvferry_transfers_ended_total", ("outcome", "completed"), ("reason", "ok"), ("role", "decode")] == 2
    assert shown["kvferry_rpc_seconds_count", ("code", "OK"), ("method", "Cache/Stats")] >= 1


def test_a_port_that_is_taken_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for flags in (["--listen", address], ["--listen", "127.0.0.1:0", "--metrics", address]):
            words = [sys.executable, "-m", "kvferry", "serve", "--role", "decode", "--log-level", "error", *flags]
            words += ["--socket", f"/tmp/kvferry-test-{os.getpid()}.sock"]
            done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
            assert done.returncode == 2
            assert done.stderr == f"kvferry serve: {flags[-2]} {address}: Address already in use\n"


def test_no_daemon_is_said_so() -> None:
    done = stats_command("127.0.0.1:1")
    assert done.returncode == 2
    assert "UNAVAILABLE" in done.stderr
    assert stats_command("nowhere").returncode == 2


def test_sizes_for_people() -> None:
    assert [size(n) for n in (0, 1023, 1024, 5 << 20, 3 << 40)] == ["0 B", "1023 B", "1.0 KiB", "5.0 MiB", "3.0 TiB"]


def test_the_default_metrics_port_may_be_anothers() -> None:
    with contextlib.ExitStack() as ends, Stack() as stack:
        taken = ends.enter_context(socket.socket())
        with contextlib.suppress(OSError):  # somebody else has it: as good
            taken.bind(("127.0.0.1", 9470))
            taken.listen()
        listen = f"127.0.0.1:{lasting_port()}"
        path = os.path.join(stack.folder, "d.sock")
        process = stack.start("d", ["serve", "--role", "decode", "--listen", listen, "--socket", path])
        with grpc.insecure_channel(stack.ready(process), [("grpc.enable_http_proxy", 0)]) as channel:
            metrics = fetch(channel).metrics
        assert metrics.startswith("127.0.0.1:") and metrics != "127.0.0.1:9470"
        assert "--metrics 127.0.0.1:9470: Address already in use; metrics are at any free port" in process.tail()
