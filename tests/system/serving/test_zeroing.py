"""Pages as a worker is given them when other tenants had them before: nothing is left, with --zero-freed."""

from __future__ import annotations

import asyncio
import os

import grpc
import numpy as np
import pytest

from kvferry._core import GpuUnavailable, gpu_device_count
from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestName
from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.proto import cache_pb2, common_pb2
from kvferry.radix.digests import prompt_digests, root_digest
from kvferry.transfer.geometry.kv_geometry import KVGeometry
from kvferry.transfer.geometry.namespace import NamespaceFacts
from tests.support.engines import OPTIONS

PAGE = 16
PAGES = 8
GEOMETRY = KVGeometry(layers=2, kv_heads=2, head_dim=8, dtype="float16", page_size=PAGE)
SECRET = np.full(GEOMETRY.page_bytes, 0xAB, np.uint8)
pytestmark = pytest.mark.timeout(60)


def facts(salt: bytes) -> common_pb2.NamespaceFacts:
    return NamespaceFacts("model", "1", GEOMETRY, "sha256_cbor", root_digest(b"zeroing"), salt).to_proto()


class Tenant:
    """A worker of a namespace of its own."""

    def __init__(self, client: DaemonClient) -> None:
        self.client = client

    @staticmethod
    async def join(socket: str, salt: bytes) -> Tenant:
        return Tenant(await DaemonClient.connect(socket, common_pb2.ROLE_DECODE, facts(salt), "worker"))

    async def admit(self, first: int, tokens: int, max_new: int) -> tuple[RequestName, list[int]]:
        prompt = prompt_digests(np.arange(first, first + tokens, dtype=np.uint32), page_size=PAGE)
        name = RequestName(os.urandom(16), 1)
        admitted = await self.client.admit(
            name,
            digests=prompt.digests,
            tokens=tokens,
            tail_digest=prompt.tail,
            prefill="",
            max_new_tokens=max_new,
            deadline_s=20,
        )
        return name, list(admitted.pages)

    def holds(self, pages: list[int]) -> int:
        """Bytes in these pages that are not zero."""
        pools = self.client.pools
        return sum(int(np.count_nonzero(pools.read(0, page))) for page in pages)

    def write(self, pages: list[int]) -> None:
        for page in pages:
            self.client.pools.store(page, SECRET)


async def leave_secrets(tenant: Tenant, clean: bool) -> None:
    """In every page of the pool: half of them cached, half of a request that was aborted."""
    kept, pages = await tenant.admit(0, 4 * PAGE, 1)
    if clean:
        assert tenant.holds(pages) == 0, "fresh memory"
    other, more = await tenant.admit(1000, 4 * PAGE, 1)
    assert sorted(pages + more) == list(range(PAGES))
    tenant.write(pages + more)
    await tenant.client.finish(kept, tokens=4 * PAGE, digests=b"")
    await tenant.client.abort(other, "test")


def statistics(address: str) -> cache_pb2.SideStats:
    with grpc.insecure_channel(address, OPTIONS) as channel:
        return fetch(channel).sides[0]


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)], ids=["in shared memory", "on a GPU"]
)
@pytest.mark.parametrize("zero_freed", ["on", "off"])
def test_what_other_tenants_left(zero_freed: str, device: str) -> None:
    if device != "cpu":
        pytest.importorskip("torch")
        try:
            gpu_device_count()
        except GpuUnavailable as error:
            pytest.skip(f"needs a GPU: {error}")

    async def scenario(socket: str, address: str) -> None:
        one = await Tenant.join(socket, b"\x01" * 32)
        await leave_secrets(one, clean=device == "cpu" or zero_freed == "on")
        two = await Tenant.join(socket, b"\x02" * 32)
        name, pages = await two.admit(0, 6 * PAGE, 2 * PAGE)  # from what was cached and from what was aborted
        grown = list(await two.client.grow(name, 8 * PAGE))
        assert sorted(pages + grown) == list(range(PAGES))
        left = two.holds(pages + grown)
        if zero_freed == "on":
            assert left == 0
            at_first = 0 if device == "cpu" else PAGES  # no driver promises that a GPU's memory is clear
            assert statistics(address).pool.zeroed == at_first + PAGES
        else:
            assert left == PAGES * GEOMETRY.page_bytes, "the test sees what there is to be seen"
            assert statistics(address).pool.zeroed == 0
        await two.client.abort(name, "test")
        await one.client.close()
        await two.client.close()

    with Stack() as stack:
        socket = os.path.join(stack.folder, "d.sock")
        words = ["serve", "--role", "decode", "--listen", "127.0.0.1:0", "--socket", socket, "--page-size", str(PAGE)]
        words += ["--pool-bytes", str(PAGES * GEOMETRY.page_bytes), "--zero-freed", zero_freed, "--device", device]
        address = stack.ready(stack.start("daemon", words))
        asyncio.run(asyncio.wait_for(scenario(socket, address), 50))
