"""`kvferry pin --tokens` where an engine names the pages: its root digest, and several of its blocks a page."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestName
from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.proto import common_pb2
from kvferry.radix.digests import chain_digests, root_digest, tail_digest
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.namespace import NamespaceFacts
from tests.support.engines import OPTIONS

BLOCK, PAGE = 8, 16
TOKENS = list(range(5 * BLOCK))  # 2 full pages and a block
ROOT = root_digest("42")  # as of an engine with a hash seed of its own
GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=8, dtype="float16", page_size=PAGE)
pytestmark = pytest.mark.timeout(60)


async def cached(socket: str, algorithm: str) -> DaemonClient:
    """A worker that has left TOKENS in the daemon's tree."""
    facts = NamespaceFacts("model", "1", GEOMETRY, algorithm, ROOT, digest_tokens=BLOCK).to_proto()
    client = await DaemonClient.connect(socket, common_pb2.ROLE_DECODE, facts, "worker")
    hashes = [bytes(row) for row in chain_digests(TOKENS, page_size=BLOCK, parent=ROOT)]
    pages = [hashes[1], hashes[3]]  # each is named by its last block
    name = RequestName(os.urandom(16), 1)
    await client.admit(
        name,
        digests=b"".join(pages),
        tokens=len(TOKENS),
        tail_digest=tail_digest(TOKENS[2 * PAGE :], page_size=PAGE, parent=pages[-1]),
        prefill="",
        max_new_tokens=1,
        deadline_s=20,
    )
    await client.finish(name, tokens=len(TOKENS), digests=b"")
    return client


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "sha256"])
def test_tokens_of_an_engine(algorithm: str, tmp_path: Path) -> None:
    async def scenario(socket: str, address: str) -> subprocess.CompletedProcess[str]:
        client = await cached(socket, algorithm)
        with grpc.insecure_channel(address, OPTIONS) as channel:
            said = fetch(channel).sides[0].digests
        assert (said.page_size, said.algorithm, said.root_digest, said.digest_tokens) == (PAGE, algorithm, ROOT, BLOCK)
        words = ["pin", "--socket", socket, "--tokens", str(tmp_path / "tokens.json"), "--seconds", "60"]
        done = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "kvferry", *words], capture_output=True, text=True, check=False
        )
        await client.close()
        return done

    (tmp_path / "tokens.json").write_text(json.dumps(TOKENS))
    with Stack() as stack:
        socket = os.path.join(stack.folder, "d.sock")
        words = ["serve", "--role", "decode", "--listen", "127.0.0.1:0", "--socket", socket, "--page-size", str(PAGE)]
        address = stack.ready(stack.start("daemon", [*words, "--pool-bytes", str(8 * GEOMETRY.page_bytes)]))
        done = asyncio.run(asyncio.wait_for(scenario(socket, address), 50))
    if algorithm == "sha256_cbor":
        assert done.stdout == "pin 1 holds 32 tokens for 60 s\n", done.stderr
    else:
        assert done.returncode == 2
        assert "pages are named by sha256, and this command hashes by sha256_cbor only; give --digests" in done.stderr
