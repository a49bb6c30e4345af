"""Tensor parallelism in whole systems: the pools of a daemon's ranks are segments of this machine, the synthetic
workers write and check every byte on every rank."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from kvferry.daemon.cli.stack import Stack, StackError
from kvferry.daemon.cli.system import Replica, SystemSpec, start_replicas
from kvferry.proto.cache_pb2 import SideStats
from tests.support.engines import Engines, settled, stats

PAGE = 16
HEAD_BYTES = 2 * 2 * PAGE * 16 * 4  # of a page: layers, K and V, tokens, elements of float32
HEADS = 4
SLOTS = 4


@dataclass(frozen=True)
class Case:
    prefill: int  # ranks
    decode: int
    storages: tuple[str, str]
    layout: str = "nhd"
    heads: int = HEADS
    tensors: int = 2
    slot_bytes: int = 8 << 20

    @property
    def row_bytes(self) -> int:
        """Of a page, each head once."""
        return HEAD_BYTES * self.heads * self.tensors // 2

    def page_bytes(self, ranks: int) -> int:
        """Of a page on all of them."""
        return self.row_bytes * (ranks if self.tensors == 1 else max(1, ranks // self.heads))


CASES = {
    "1 to 2": Case(1, 2, ("page", "layer")),
    "2 to 1": Case(2, 1, ("layer-blocks", "page"), layout="hnd", slot_bytes=4096),  # a row takes several parts
}
NIGHTLY = {
    "2 to 4": Case(2, 4, ("layer", "page")),
    "4 to 2": Case(4, 2, ("layer", "layer"), layout="hnd"),
    "2 to 2": Case(2, 2, ("page", "layer-blocks"), slot_bytes=5000),
    "grouped queries, 1 to 4": Case(1, 4, ("page", "layer"), heads=2),
    "grouped queries, 4 to 2": Case(4, 2, ("layer", "page"), heads=2),
    "latent attention, 2 to 1": Case(2, 1, ("page", "page"), heads=1, tensors=1),
    "latent attention, 1 to 2": Case(1, 2, ("layer", "page"), heads=1, tensors=1),
}


def ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(32_000) for _ in range(n)]


def spec_of(case: Case, decode_pages: int = 40) -> SystemSpec:
    both = ["--slots", str(SLOTS), "--slot-bytes", str(case.slot_bytes), "--checksums", "on"]
    host = ["--host-bytes", str(1000 * case.row_bytes)]
    return SystemSpec(
        page_size=PAGE,
        decode_pool_bytes=decode_pages * case.page_bytes(case.decode),
        prefill_pool_bytes=decode_pages * case.page_bytes(case.prefill),
        prefill_flags=[*both, *host, "--ranks", str(case.prefill), "--storage", case.storages[0]],
        decode_flags=[*both, *host, "--ranks", str(case.decode), "--storage", case.storages[1]],
        worker_flags=[
            *("--synthetic-kv-heads", str(case.heads), "--synthetic-tensors", str(case.tensors)),
            *("--synthetic-layout", case.layout),
        ],
    )


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name) for name, case in CASES.items()]
    + [pytest.param(case, id=name, marks=pytest.mark.nightly) for name, case in NIGHTLY.items()],
)
def test_chats_between_ranks_over_both_tiers(stack: Stack, case: Case) -> None:
    """Each turn moves only its delta, pools smaller than the chats lose nothing, and bytes are counted over ranks."""
    prefills, decodes = start_replicas(stack, spec_of(case))
    prefill, decode = chat_over_both_tiers(prefills[0], decodes[0], case)
    for side in (decode, prefill):
        assert side.host.page_bytes == case.row_bytes
        assert [(peer.slots, peer.free_credits) for peer in side.peers] == [(SLOTS * case.decode, SLOTS * case.decode)]
    assert (decode.pool.pages, decode.pool.page_bytes) == (40, case.page_bytes(case.decode))
    assert (prefill.pool.pages, prefill.pool.page_bytes) == (40, case.page_bytes(case.prefill))


def chat_over_both_tiers(prefill: Replica, decode: Replica, case: Case) -> tuple[SideStats, SideStats]:
    """Chats that pools of `spec_of` cannot hold; what they moved, spilled and restored. Both sides' statistics."""
    rng = random.Random(1)
    histories = [ids(rng, 90) for _ in range(8)]
    left = [0] * len(histories)
    pages = 0
    with Engines(prefill, decode) as engines:
        for _ in range(2):
            for i, history in enumerate(histories):
                turn = engines.turn(history, 20)
                assert turn.error is None, turn.details
                assert turn.matched == left[i] // PAGE * PAGE
                assert turn.delta_pages == -(-len(history) // PAGE) - turn.matched // PAGE
                assert turn.delta_bytes == turn.delta_pages * case.page_bytes(case.decode)
                pages += turn.delta_pages
                left[i] = len(history) + 19
                histories[i] = history + turn.output + ids(rng, 30)
        together = engines.turns([ids(rng, 100) for _ in range(6)], 3)  # transfers take turns on every lane
        assert [turn.details for turn in together if turn.error] == []
        pages += sum(turn.delta_pages for turn in together)
    sides = settled(prefill), settled(decode)
    for side in sides:
        check_transfers(side, pages, case.page_bytes(case.decode))
        assert side.tiers.restored_pages > 0
        assert side.tiers.mismatched_pages == side.tiers.restore_failed_pages == side.tiers.spill_failed_pages == 0
    return sides


def check_transfers(side: SideStats, pages: int, page_bytes: int) -> None:
    transfers = side.transfers
    assert transfers.delta_pages == pages
    assert transfers.delta_bytes == pages * page_bytes
    assert transfers.wire_bytes == pages * page_bytes + 64 * transfers.parts
    assert transfers.asked_again == transfers.dropped_parts == transfers.failed == 0


@pytest.mark.nightly
def test_ranks_that_cannot_share_the_heads_are_refused(stack: Stack) -> None:
    with pytest.raises(StackError, match=r"ranks is 3; it must divide geometry\.kv_heads = 4"):
        start_replicas(stack, spec_of(Case(1, 3, ("page", "page"))))


@pytest.mark.nightly
def test_a_peer_whose_ranks_end_and_come_again(stack: Stack) -> None:
    """A session that breaks with parts on several lanes under way; the next one asks again for what is missing."""
    case = Case(2, 4, ("layer", "page"), slot_bytes=4096)
    prefills, decodes = start_replicas(stack, spec_of(case, decode_pages=400))
    rng = random.Random(3)
    with Engines(prefills[0], decodes[0]) as engines:
        assert engines.turn(ids(rng, 300), 3).error is None
        stack.kill(prefills[0].daemon)
        assert engines.turn(ids(rng, 300), 3, deadline_s=5).error is not None
    assert settled(decodes[0], 20.0).pool.pages == 400
    assert stats(decodes[0]).transfers.delta_pages >= 19
