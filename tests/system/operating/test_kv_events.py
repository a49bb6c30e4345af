"""KV events of whole systems, read as routers read them."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx
import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.cli.system import Replica, start_replicas
from kvferry.proto import cache_pb2
from kvferry.radix.digests import DIGEST_BYTES, prompt_digests
from tests.support.engines import OPTIONS, Engines, settled
from tests.support.kv_event_reader import Subscriber
from tests.support.other_routers import dynamo
from tests.support.stacks import SmallSystem

PAGE = 16
PAGE_BYTES = 4096  # of the synthetic worker's default geometry at page size 16
EVENTS = ["--events", "tcp://127.0.0.1:0", "--events-replay", "tcp://127.0.0.1:0", "--events-topic", "kv@decode-0"]


def published(replica: Replica) -> cache_pb2.KvEventStats:
    with grpc.insecure_channel(replica.daemon_address, OPTIONS) as channel:
        return fetch(channel).sides[0].events


def hashes(tokens: list[int]) -> list[int]:
    """Of the full pages of a prompt, by our own digests: 64 bits of each."""
    digests = prompt_digests(tokens, page_size=PAGE).digests
    return [int.from_bytes(digests[at - 8 : at], "big") for at in range(DIGEST_BYTES, len(digests) + 1, DIGEST_BYTES)]


def read_until(subscriber: Subscriber, done: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        assert subscriber.read(0.2) or time.monotonic() < deadline, "the events did not come"


def test_a_router_sees_both_tiers(stack: Stack) -> None:
    read_both_tiers(stack)


def read_both_tiers(stack: Stack) -> list[bytes]:
    """Two turns and then as many other prompts as push them to the host: at each point the events say what is where.
    Returns the batches.
    """
    flags = ["--host-bytes", str(400 * PAGE_BYTES), *EVENTS]
    spec = SmallSystem(page_size=PAGE, decode_pool_bytes=40 * PAGE_BYTES, decode_flags=flags)
    prefills, decodes = start_replicas(stack, spec)
    told = published(decodes[0])
    rng = random.Random(5)
    with Subscriber(told.endpoint, told.replay, "kv@decode-0") as router, Engines(prefills[0], decodes[0]) as engines:
        # A subscriber that comes late has missed what it can ask for again.
        assert router.replay(0) >= 1
        assert router.router.cleared == 1
        prompt = [rng.randrange(32_000) for _ in range(100)]
        first = engines.turn(prompt, 30)
        history = prompt + first.output
        # The last token's KV is not computed: 129 tokens are 8 pages, of prompt and output.
        held = hashes(history[:-1])
        assert len(held) == 8
        read_until(router, lambda: router.router.held["GPU"] >= set(held))
        assert router.router.prompt_of(held[-1]) == history[: 8 * PAGE]
        second = engines.turn(history, 20)
        assert second.matched == 8 * PAGE
        longer = hashes([*history, *second.output][:-1])
        read_until(router, lambda: router.router.held["GPU"] >= set(longer))
        assert router.router.held["GPU"] == set(longer)
        assert router.router.held["CPU"] == set()
        for _ in range(4):
            assert engines.turn([rng.randrange(32_000) for _ in range(300)], 5).error is None
        read_until(router, lambda: router.router.held["CPU"] >= set(longer))
        assert router.router.held["GPU"].isdisjoint(longer)
        # It comes back: its pages are on the device again, and still on the host.
        assert engines.turn(history, 2).matched > 0
        read_until(router, lambda: router.router.held["GPU"] >= set(held))
        side = settled(decodes[0])
        told = published(decodes[0])
        read_until(router, lambda: router.sequences[-1] + 1 >= told.batches)
        assert len(router.router.held["CPU"]) == side.host.cached
        assert len(router.router.held["GPU"]) == side.pool.cached, "every page was announced with its tokens"
        assert told.batches == router.sequences[-1] + 1
        assert told.queue_dropped == told.subscriber_dropped == 0
        return router.payloads


@pytest.mark.nightly
def test_what_the_decode_worker_computes_itself_is_announced(stack: Stack) -> None:
    _, decodes = start_replicas(stack, SmallSystem(page_size=PAGE, prefills=0, decode_flags=EVENTS))
    told = published(decodes[0])
    prompt = list(range(70))
    with Subscriber(told.endpoint, told.replay, "kv@decode-0") as router, Engines(None, decodes[0]) as engines:
        threads = [threading.Thread(target=engines.turn, args=(prompt, 20)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        settled(decodes[0])
        router.replay(0)
        assert set(hashes(prompt)) <= router.router.held["GPU"]
        assert router.router.prompt_of(hashes(prompt)[-1]) == prompt[:64]


READ_BY_VLLM = """
import json, sys
import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
decoder = msgspec.msgpack.Decoder(KVEventBatch)
events = [event for line in sys.stdin for event in decoder.decode(bytes.fromhex(line)).events]
print(json.dumps({
    "kinds": sorted({type(event).__name__ for event in events}),
    "media": sorted({event.medium for event in events if isinstance(event, (BlockStored, BlockRemoved))}),
    "tokens": sum(len(event.token_ids) for event in events if isinstance(event, BlockStored)),
}))
"""


@pytest.mark.nightly
def test_vllms_own_classes_read_them(stack: Stack) -> None:
    """In an environment that has vLLM: VLLM_PYTHON, or what `make demo-vllm` made."""
    python = os.environ.get("VLLM_PYTHON", str(Path(__file__).parents[3] / "build" / "vllm-venv" / "bin" / "python"))
    if not os.path.exists(python):
        pytest.skip(f"no vLLM: {python} is not there")
    payloads = read_both_tiers(stack)
    done = subprocess.run(
        [python, "-c", READ_BY_VLLM],
        input="".join(f"{payload.hex()}\n" for payload in payloads),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    read = json.loads(done.stdout.splitlines()[-1])
    assert read["kinds"] == ["AllBlocksCleared", "BlockRemoved", "BlockStored"]
    assert read["media"] == ["CPU", "GPU"]
    assert read["tokens"] > 0


INDEXER = "import sys; from dynamo._core import run_kv_indexer; run_kv_indexer(sys.argv[1:])"


class Indexer:
    """Dynamo's own, as a process: it listens to the events of one daemon. A context."""

    def __init__(self, site: Path, endpoint: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._endpoint = endpoint
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False)
        words = [sys.executable, "-c", INDEXER, "--port", str(port)]
        settings = {**os.environ, "PYTHONPATH": str(site)}
        self._process = subprocess.Popen(words, env=settings, stdout=subprocess.DEVNULL)

    def __enter__(self) -> Indexer:
        deadline = time.monotonic() + 30
        while True:
            try:
                self._client.get("/health")
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline, "Dynamo's indexer did not come up"
                time.sleep(0.1)
        told = {"instance_id": 1, "endpoint": self._endpoint, "model_name": "m", "block_size": PAGE}
        self._client.post("/register", json=told).raise_for_status()
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        self._client.close()

    def matched(self, tokens: list[int]) -> int:
        """Tokens of it that the daemon has on its device, as Dynamo sees it."""
        found = self._client.post("/query", json={"token_ids": tokens, "model_name": "m"}).json()["instances"]
        return int(found["1"]["gpu"]) if "1" in found else 0


@pytest.mark.nightly
def test_dynamos_own_indexer_finds_what_is_on_the_device(stack: Stack, tmp_path: Path) -> None:
    site = dynamo(tmp_path / "site")
    flags = ["--host-bytes", str(400 * PAGE_BYTES), "--events", "tcp://127.0.0.1:0"]
    spec = SmallSystem(page_size=PAGE, decode_pool_bytes=40 * PAGE_BYTES, decode_flags=flags)
    prefills, decodes = start_replicas(stack, spec)
    rng = random.Random(5)
    prompt = [rng.randrange(32_000) for _ in range(100)]
    with Indexer(site, published(decodes[0]).endpoint) as indexer, Engines(prefills[0], decodes[0]) as engines:

        def sees(history: list[int], pages: int) -> None:
            deadline = time.monotonic() + 10
            while (got := indexer.matched(history)) != pages * PAGE:
                assert time.monotonic() < deadline, f"Dynamo sees {got} tokens, not those of {pages} pages"
                time.sleep(0.05)

        history = prompt + engines.turn(prompt, 30).output
        sees(history, 8)
        sees(prompt, 6)
        sees([1, *prompt], 0)
        for _ in range(4):
            assert engines.turn([rng.randrange(32_000) for _ in range(300)], 5).error is None
        sees(history, 0)  # it is on the host, of which Dynamo takes events with tokens alone
        assert engines.turn(history, 2).matched > 0
        sees(history, 8)
