"""Systems whose sides have several ranks, and chats over both tiers of them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.system import Replica, SystemSpec
from kvferry.proto.cache_pb2 import SideStats
from tests.support.engines import Engines, settled

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
    indexer: int = 0  # bytes a token in each of the layers, which every rank has

    @property
    def indexer_bytes(self) -> int:
        """Of a page."""
        return 2 * PAGE * self.indexer

    @property
    def row_bytes(self) -> int:
        """Of a page, each head once."""
        return HEAD_BYTES * self.heads * self.tensors // 2 + self.indexer_bytes

    def page_bytes(self, ranks: int) -> int:
        """Of a page on all of them."""
        copies = ranks if self.tensors == 1 else max(1, ranks // self.heads)
        return (self.row_bytes - self.indexer_bytes) * copies + self.indexer_bytes * ranks


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
            *(["--synthetic-further", f"layers=2,head_dim={case.indexer}"] if case.indexer else []),
        ],
    )


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


def started_again(stack: Stack, decode: Replica, prefill: Replica, system: SystemSpec) -> Replica:
    """The decode daemon and its worker once more, with the same flags."""
    words = ["serve", "--role", "decode", "--name", decode.name, "--listen", "127.0.0.1:0", "--socket", decode.socket]
    words += ["--page-size", str(PAGE), "--pool-bytes", str(system.decode_pool_bytes), *system.decode_flags]
    daemon = stack.start(decode.name, [*words, "--peer", f"{prefill.name}={prefill.daemon_address}"])
    address = stack.ready(daemon)
    words = ["worker", "decode", "--socket", decode.socket, "--listen", "127.0.0.1:0", "--synthetic"]
    worker = stack.start(f"{decode.name}-worker", [*words, *system.worker_flags])
    return Replica(decode.name, daemon, worker, address, stack.ready(worker), decode.socket)


def check_transfers(side: SideStats, pages: int, page_bytes: int) -> None:
    transfers = side.transfers
    assert transfers.delta_pages == pages
    assert transfers.delta_bytes == pages * page_bytes
    assert transfers.wire_bytes == pages * page_bytes + 64 * transfers.parts
    assert transfers.asked_again == transfers.dropped_parts == transfers.failed == 0
