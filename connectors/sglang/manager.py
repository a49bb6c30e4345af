"""The manager of one rank of an SGLang engine: what SGLang's own managers do for bootstrapping, and a carrier."""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST, DisaggregationMode
from sglang.srt.utils.network import NetworkAddress

from kvferry.client.client import DaemonClient
from kvferry.client.one_rank import TOGETHER_SECONDS
from kvferry.client.requests import RequestName
from kvferry.connectors.lookups import HeldPrefixes
from kvferry.connectors.sglang import engine, facts
from kvferry.connectors.sglang.bootstrap import announce, daemon_of, tell_rank
from kvferry.connectors.sglang.carrier import Carrier
from kvferry.connectors.sglang.peers import PeerNames
from kvferry.connectors.sglang.rows import MetadataRows
from kvferry.connectors.sglang.settings import BackendSettings
from kvferry.connectors.sglang.stores import FinishedPages
from kvferry.connectors.sglang.transfers import GpuMoment, PageTransfer, StoredPrompt
from kvferry.connectors.sglang.waiting import WaitingPrompts
from kvferry.proto import common_pb2

# SGLang's scheduler never rests: for so long another thread waits for its turn, some times for each of the daemon's
# words. A word and its answer take 0.5 ms so in the median, with 0.5 ms 1.2, with Python's own 5 ms 2.1 and sometimes
# seconds (bench/sglang/busy_turns.py).
SWITCH_SECONDS = 0.0001
SETTLE_SECONDS = 5.0  # that a flush of SGLang's cache waits for copies
HELD_SECONDS = 5.0  # that the daemon's answer is waited for
LATE_MS = 1  # SGLang answers for prefill, and frees its pages, when the last word of a prompt comes
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


class KVFerryManager(CommonKVManager):  # type: ignore[misc]
    """Made by SGLang for each rank, on its scheduler's thread, as are all its methods called."""

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        queue = engine.queue_of_manager()
        facts.check_server(server_args)
        facts.check_engine(queue, args)
        self.settings = BackendSettings.of(os.environ)
        super().__init__(args, disaggregation_mode, server_args, is_mla_backend)
        self.enable_deferred_decode_kv_release = False  # what has failed touches no page
        self.rows = MetadataRows(args)
        self._scheduler = queue.scheduler
        self._ranks = queue.gloo_group
        self.tree = getattr(queue, "tree_cache", None)  # decode's
        self._device = str(queue.token_to_kv_pool.device)
        self.peers = PeerNames(lambda question: self.carrier.ask(question), daemon_of)
        self.is_prefill = disaggregation_mode == DisaggregationMode.PREFILL
        own = self._own(queue, args)
        self._held: HeldPrefixes | None = None
        most = self.settings.waiting_share * int(min(args.kv_data_lens) // args.kv_item_lens[0])
        self.finished = FinishedPages(most, self._stored, lambda order: self.carrier.store(order), self._agree)
        self.waiting = WaitingPrompts(
            most, lambda order: self.carrier.stow(order), lambda: self.carrier.stows, self._agree
        )
        self.carrier = Carrier(self.settings, own, self.rows.write, self._connected)
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        self.carrier.start(TOGETHER_SECONDS if self.attn_tp_size > 1 else 0.0)
        engine.use(self)

    def _own(self, queue: Any, args: Any) -> Any:
        """What opens a session that has this rank's pages."""
        pool, ranks = queue.token_to_kv_pool, self.attn_tp_size
        role = common_pb2.ROLE_PREFILL if self.is_prefill else common_pb2.ROLE_DECODE
        geometry = facts.geometry_of(pool, queue.scheduler.model_config, ranks)
        told = facts.facts_of(queue, self.settings, geometry).to_proto()
        blocks = facts.block_map(args, facts.own_geometry(geometry, ranks))
        register = facts.registration(blocks, geometry, args.gpu_id)
        socket = self.settings.at_rank(self.system_dp_rank, self.system_dp_size)
        rank = facts.rank_of(self, role)
        worker = f"sglang {'prefill' if self.is_prefill else 'decode'} rank {self.attn_tp_rank}"

        async def connect(*, deadline_s: float) -> DaemonClient:
            own = register()
            if self.is_prefill:
                own.stows()
            return await DaemonClient.connect(
                socket, role, told, worker, deadline_s=deadline_s, late_ms=LATE_MS, own=own, rank=rank
            )

        return connect

    def close(self) -> None:
        """Ends the session; no page is touched any more. SGLang itself only ends its processes."""
        self.carrier.close()
        if self._held is not None:
            self._held.close()

    # -- names

    def name_of(self, bootstrap_addr: str, room: int) -> RequestName:
        """A request's, the same on both sides: by the prefill engine's host, as the router names it, and the room."""
        host = bootstrap_addr.rpartition(":")[0].strip("[]")
        return RequestName(hashlib.sha256(f"sglang {host} {room}".encode()).digest()[:16], 1)

    def tell_rank(self, bootstrap_addr: str, room: int) -> None:
        """Has the bootstrap server know that this rank computes the room's prompt."""
        self.carrier.ask(partial(tell_rank, bootstrap_addr, room, self.system_dp_rank))

    def _connected(self, daemon: str, namespace_id: bytes, outdated: threading.Event) -> None:
        if not self.is_prefill:
            if self._held is None and self.attn_tp_size == 1:
                socket = self.settings.at_rank(self.system_dp_rank, self.system_dp_size)
                self._held = HeldPrefixes(socket, common_pb2.ROLE_DECODE, namespace_id, timeout_s=HELD_SECONDS)
        else:
            host = self.bootstrap_host
            if self.dist_init_addr:
                host = NetworkAddress.parse(self.dist_init_addr).resolved().host
            address = NetworkAddress(_WILDCARDS.get(host, host), self.bootstrap_port).to_host_port_str()
            announce(address, self.system_dp_rank, daemon, outdated)

    # -- the GPU

    def begun(self) -> Sequence[GpuMoment]:
        """What the engine has told its GPU by now: steps that may still write pages that it has given up since."""
        if not self._device.startswith("cuda"):
            return ()
        import torch

        moments = []
        for stream in (self._scheduler.forward_stream, torch.cuda.current_stream()):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
            moments.append(event)
        return moments

    # -- what decode has finished

    @property
    def keeps(self) -> bool:
        """Whether there is a host tier for what has finished; of several ranks, the daemon knows."""
        return self.attn_tp_size > 1 or (self._held is not None and self._held.keeps)

    def keep_finished(self, request: Any, tokens: Any, tree: Any) -> None:
        """Has the daemon's host tier keep what the tree has of these tokens. The request has just finished."""
        warms_up = request.bootstrap_host == FAKE_BOOTSTRAP_HOST  # nothing was computed
        if warms_up or not self.keeps:
            return
        name = f"sglang store {request.bootstrap_host} {request.bootstrap_room} {len(tokens)}"
        self.finished.add(RequestName(hashlib.sha256(name.encode()).digest()[:16], 1), request, tokens, tree)

    def settle_finished(self) -> bool:
        """Whether nothing of the radix cache is read behind this, on any rank."""
        return self.finished.settle(SETTLE_SECONDS)

    def _stored(self, transfer: PageTransfer, blocks: list[int]) -> StoredPrompt:
        return StoredPrompt(transfer, blocks, self.begun())

    def _agree(self, over: list[bool]) -> list[bool]:
        if self.attn_tp_size == 1:
            return over
        import torch
        import torch.distributed as dist

        told = torch.tensor(over, dtype=torch.uint8)
        dist.all_reduce(told, op=dist.ReduceOp.MIN, group=self._ranks)
        return [bool(each) for each in told.tolist()]
