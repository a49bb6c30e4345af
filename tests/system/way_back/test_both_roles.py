"""The way back of daemons with both roles: each side fetches, or sends back, over a session of its own."""

from __future__ import annotations

import random
from functools import partial

from kvferry.daemon.cli.stack import Stack, lasting_port
from kvferry.daemon.cli.system import Replica, SystemSpec, start_replicas
from kvferry.proto import cache_pb2
from tests.support.engines import Engines, Turn, both_settled, wait_until
from tests.system.serving.ranks import ids
from tests.system.way_back.conversations import ALWAYS, is_up

PAGE = 16


def started(stack: Stack) -> tuple[tuple[Replica, Replica], tuple[Replica, Replica]]:
    """Two daemons, each the other's peer, both with a worker of each role: (prefill, decode) of each."""
    port = lasting_port()
    flags = ["--role", "both", "--checksums", "on", *ALWAYS]
    one_peer = ["--peer", f"decode-0=127.0.0.1:{port}"]
    spec = SystemSpec(
        page_size=PAGE,
        prefill_flags=[*flags, *one_peer],
        decode_flags=[*flags, "--listen", f"127.0.0.1:{port}"],
        prefill_pool_bytes=16 << 20,
        decode_pool_bytes=16 << 20,
    )
    (one,), (two,) = start_replicas(stack, spec)
    sides = (one, other_worker(stack, one, "decode")), (other_worker(stack, two, "prefill"), two)
    for replica in (one, two):
        wait_until(partial(is_up, replica), 30.0, "its sessions are up")
    return sides


def other_worker(stack: Stack, replica: Replica, role: str) -> Replica:
    """The same daemon, with a further worker of its other role."""
    words = ["worker", role, "--synthetic", "--socket", replica.socket, "--listen", "127.0.0.1:0"]
    worker = stack.start(f"{replica.name}-{role}-worker", words)
    address = stack.ready(worker)
    return Replica(replica.name, replica.daemon, worker, replica.daemon_address, address, replica.socket)


def converse(prefill: Replica, decode: Replica, seed: int) -> Turn:
    """The second turn of a conversation, whose first one had both at the same places."""
    rng = random.Random(seed)
    history = ids(rng, 100)
    with Engines(prefill, decode) as engines:
        first = engines.turn(history, 20)
        assert first.error is None and first.prefill_matched == 0, first.details
        second = engines.turn(history + first.output + ids(rng, 30), 20)
    assert second.error is None, second.details
    return second


def fetched(side: cache_pb2.SideStats) -> int:
    assert side.way_back.transfers.aborted == side.way_back.transfers.mismatched_parts == 0
    return side.way_back.fetched_tokens


def test_daemons_of_both_roles_fetch_from_each_other(stack: Stack) -> None:
    one, two = started(stack)
    held = (100 + 19) // PAGE * PAGE  # by decode, its output too; prefill has kept the prompt's whole pages
    own = 100 // PAGE * PAGE
    for prefill, decode in ((one[0], two[1]), (two[0], one[1])):
        turn = converse(prefill, decode, seed=len(prefill.name))
        assert turn.prefill_matched == turn.matched == held
    for replica in (one[0], two[1]):
        prefilling, decoding = both_settled(replica)
        assert fetched(prefilling) == held - own > 0
        assert decoding.way_back.transfers.completed == 1
        assert decoding.way_back.transfers.delta_pages == (held - own) // PAGE
