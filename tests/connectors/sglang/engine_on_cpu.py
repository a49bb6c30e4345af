"""An engine of SGLang's real classes on a CPU: pool, allocator, radix cache, metadata rows and the queues of its
scheduler; what a GPU would compute is written by the test."""

from __future__ import annotations

import contextlib
import secrets
import time
from array import array
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from kvferry.connectors.sglang import facts
from kvferry.connectors.sglang.plugin import BACKEND
from tests.connectors.sglang.shared_kv import HEADS, LAYERS, ONE, PAGE, Rank, SharedKV

ROWS = 8
HOST = "127.0.0.1"
SECONDS = 20.0


def until(what: Callable[[], object], seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.002)


class Launched(Exception):
    """The step is launched; no GPU is there to do it."""


class Engine:
    """One side. The scheduler is a namespace with what SGLang's queues and mixins read of it."""

    def __init__(
        self,
        role: str,
        bootstrap_port: int,
        tokens: int,
        *,
        radix: bool = True,
        rank: Rank = ONE,
        latent: bool = False,
    ) -> None:
        from sglang.srt.disaggregation.decode import DecodeReqToTokenPool
        from sglang.srt.disaggregation.utils import MetadataBuffers, ReqToMetadataIdxAllocator
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.radix_cache import RadixCache

        self.role = role
        self.rank = rank
        self.shared = SharedKV(tokens, rank, latent=latent)
        self.allocator = PagedTokenToKVPoolAllocator(tokens, PAGE, torch.bfloat16, "cpu", self.shared.pool, False)
        self.rows = MetadataBuffers(ROWS, 32, torch.bfloat16, max_sampling_mask_tokens=0)
        self.row_numbers = ReqToMetadataIdxAllocator(ROWS)
        self.req_pool = DecodeReqToTokenPool(16, 4096, "cpu", False, 16)
        params = CacheInitParams(not radix, self.req_pool, self.allocator, PAGE)
        self.tree = RadixCache(params)
        self.sent: list[Any] = []  # requests that SGLang has answered
        self.held: dict[str, int] = {}  # tokens of a request that prefill's radix cache had
        self.scheduler = self._scheduler(bootstrap_port)
        self._make_queues(bootstrap_port)

    def _scheduler(self, bootstrap_port: int) -> SimpleNamespace:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        return SimpleNamespace(
            server_args=server_args(self.role, bootstrap_port, not self.tree.disable),
            ps=SimpleNamespace(dp_rank=0, gpu_id=0, tp_rank=self.rank.rank, pp_rank=0),
            tp_worker=SimpleNamespace(
                is_hybrid_swa=False,
                model_runner=SimpleNamespace(effective_max_total_num_tokens=self.allocator.size),
            ),
            model_config=model_config(),
            enable_hisparse=False,
            enable_decode_hicache=False,
            enable_priority_scheduling=False,
            enable_overlap=True,
            enable_hicache_storage=False,
            enable_staging=False,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            running_batch=SimpleNamespace(reqs=[]),
            waiting_queue=[],
            last_batch=None,
            metrics_reporter=SimpleNamespace(enable_metrics=False),
            output_streamer=SimpleNamespace(stream_output=lambda reqs, *rest: self.sent.extend(reqs)),
            req_to_token_pool=self.req_pool,
            token_to_kv_pool_allocator=self.allocator,
            tree_cache=self.tree,
            disagg_metadata_buffers=self.rows,
            disagg_prefill_inflight_queue=[],
            req_to_metadata_buffer_idx_allocator=self.row_numbers,
            attn_cp_cpu_group=dist.group.WORLD,
            attn_tp_cpu_group=dist.group.WORLD,
            forward_stream=None,
        )

    def _make_queues(self, bootstrap_port: int) -> None:
        from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue
        from sglang.srt.disaggregation.prefill import PrefillBootstrapQueue, SchedulerDisaggregationPrefillMixin
        from sglang.srt.disaggregation.utils import TransferBackend

        common = {
            "draft_token_to_kv_pool": None,
            "req_to_metadata_buffer_idx_allocator": self.row_numbers,
            "metadata_buffers": self.rows,
            "scheduler": self.scheduler,
            "gloo_group": dist.group.WORLD,
            "tp_rank": self.rank.rank,
            "tp_size": self.rank.ranks,
            "gpu_id": 0,
            "bootstrap_port": bootstrap_port,
            "max_total_num_tokens": self.allocator.size,
            "pp_rank": 0,
            "transfer_backend": TransferBackend(BACKEND),
        }
        with mock.patch.object(facts, "registration", self.shared.registration):
            if self.role == "prefill":
                self.queue = PrefillBootstrapQueue(token_to_kv_pool=self.shared.pool, pp_size=1, **common)
                self.scheduler.disagg_prefill_bootstrap_queue = self.queue
                failed = SchedulerDisaggregationPrefillMixin.handle_bootstrap_failure
                self.scheduler.handle_bootstrap_failure = partial(failed, self.scheduler)
            else:
                self.transfers = DecodeTransferQueue(
                    dist.group.WORLD, self.row_numbers, 0, self.rows, self.scheduler, self.tree
                )
                self.queue = DecodePreallocQueue(
                    req_to_token_pool=self.req_pool,
                    token_to_kv_pool_allocator=self.allocator,
                    transfer_queue=self.transfers,
                    tree_cache=self.tree,
                    dp_size=1,
                    num_reserved_decode_tokens=16,
                    **common,
                )
        self.manager = self.queue.kv_manager

    def close(self) -> None:
        self.manager.close()
        self.shared.file.unlink()

    @property
    def free_pages(self) -> set[int]:
        return set(self.allocator.free_pages.tolist())

    def slots(self, req: Any, start: int, end: int) -> Any:
        return self.req_pool.req_to_token[req.req_pool_idx, start:end].numpy()

    # -- decode

    def admit(self, req: Any) -> Any:
        self.queue.add(req)
        return req

    def turn(self) -> list[Any]:
        """One turn of a decode engine's loop; requests whose KV is there."""
        self.queue.resume_retracted_reqs()
        preallocated, _ = self.queue.pop_preallocated()
        self.transfers.extend(preallocated)
        return list(self.transfers.pop_transferred())

    def arrived(self, req: Any, seconds: float = SECONDS) -> bool:
        """Turns until the request's KV is there; False: SGLang has given it up."""
        there: list[Any] = []

        def over() -> bool:
            there.extend(self.turn())
            return req in there or req in self.sent

        until(over, seconds)
        return req in there

    def finish(self, req: Any, output: Any = ()) -> None:
        """The request is over, with these tokens behind its prompt."""
        from sglang.srt.mem_cache.common import release_kv_cache

        release_kv_cache(req, self.tree)

    # -- prefill

    def bootstrap(self, req: Any) -> Any:
        self.queue.add(req, HEADS)
        until(lambda: req in self.queue.pop_bootstrapped())
        return req

    def compute(self, req: Any, chunk: int = 0, seconds_between: float = 0.0) -> None:
        """Computes a prompt in chunks and sends each, as the scheduler does."""
        self.begin(req)
        total = len(req.origin_input_ids)
        start = len(req.prefix_indices)
        chunk = chunk or total
        while start < total:
            end = min(start + chunk, total)
            self.compute_chunk(req, start, end)
            start = end
            time.sleep(seconds_between)

    def begin(self, req: Any) -> None:
        """Matches and allocates, as a batch's preparation does."""
        from sglang.srt.managers.schedule_batch import ReqKvInfo
        from sglang.srt.managers.schedule_policy import match_prefix_for_req

        total = len(req.origin_input_ids)
        match_prefix_for_req(self.tree, req, req.origin_input_ids[: total - 1], include_req=True)
        self.tree.inc_lock_ref(req.last_node)
        held = self.held[req.rid] = len(req.prefix_indices)
        self.req_pool.alloc([req])
        lengths = torch.tensor([held]), torch.tensor([total])
        last = req.prefix_indices[-1:].to(torch.int64) if held else torch.tensor([-1])
        where = self.allocator.alloc_extend(lengths[0], lengths[0], lengths[1], lengths[1], last, total - held)
        assert where is not None, "too small a pool for the test"
        self.req_pool.write((req.req_pool_idx, slice(0, held)), req.prefix_indices)
        self.req_pool.write((req.req_pool_idx, slice(held, total)), where)
        req.kv = ReqKvInfo(kv_allocated_len=total, swa_evicted_seqlen=0)
        req.cache_protected_len = held
        req.kv_committed_len = total
        req.full_untruncated_fill_ids = req.origin_input_ids

    def compute_chunk(self, req: Any, start: int, end: int) -> None:
        req.set_extend_range(start, end)
        self.launch(req)
        self.shared.write(self.slots(req, start, end), self.shared.kv_of(req.origin_input_ids, start, end))
        self.look_at_results(req, end)

    def look_at_results(self, req: Any, end: int) -> None:
        """The results of a step that computed tokens up to `end`: sends them."""
        from sglang.srt.disaggregation import prefill

        last = end == len(req.origin_input_ids)
        if last:
            req.output_ids.append(1000 + len(req.origin_input_ids))
            prefill.maybe_cache_unfinished_req(req, self.tree)
            self.scheduler.disagg_prefill_inflight_queue.append(req)
        prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk(self.scheduler, req, last_chunk=last, end_idx=end)

    def launch(self, req: Any) -> None:
        """A step of this request is launched: what is hooked before that, and nothing behind it."""
        from sglang.srt.managers.scheduler import Scheduler
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        self.scheduler.forward_ct = 0
        self.scheduler.scripted_scheduler_hook = SimpleNamespace(on_run_batch=mock.Mock(side_effect=Launched))
        with contextlib.suppress(Launched):
            Scheduler.run_batch(self.scheduler, SimpleNamespace(reqs=[req], forward_mode=ForwardMode.EXTEND))

    def inflight(self) -> list[Any]:
        """One look at what is on its way; requests that are over."""
        from sglang.srt.disaggregation.prefill import SchedulerDisaggregationPrefillMixin

        mixin = SchedulerDisaggregationPrefillMixin
        self.scheduler.handle_inflight_transfer_failure = lambda req: mixin.handle_inflight_transfer_failure(
            self.scheduler, req
        )
        return list(mixin.process_disagg_prefill_inflight_queue(self.scheduler))

    def is_sent(self, req: Any, seconds: float = SECONDS) -> bool:
        """Looks until it is over; False: it failed."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        until(lambda: req in self.inflight(), seconds)
        return not isinstance(req.finished_reason, FINISH_ABORT)


def server_args(role: str, bootstrap_port: int, radix: bool) -> SimpleNamespace:
    return SimpleNamespace(
        host=HOST,
        port=30000,
        disaggregation_bootstrap_port=bootstrap_port,
        disaggregation_mode=role,
        disaggregation_transfer_backend=BACKEND,
        disaggregation_ib_device=None,
        disaggregation_decode_enable_radix_cache=radix,
        disable_radix_cache=not radix,
        dist_init_addr=None,
        nnodes=1,
        dp_size=1,
        pp_size=1,
        enable_dp_attention=False,
        enable_dsa_cache_layer_split=False,
        load_balance_method="round_robin",
        optimistic_prefill_attempts=0,
        kv_cache_dtype="auto",
        load_format="dummy",
        download_dir=None,
        speculative_algorithm=None,
        strip_thinking_cache=False,
        page_size=PAGE,
    )


def model_config() -> SimpleNamespace:
    config = SimpleNamespace(to_dict=lambda: {"model_type": "test", "hidden_size": 32})
    return SimpleNamespace(
        hf_config=config,
        model_path="test",
        revision=None,
        quantization=None,
        dtype=torch.bfloat16,
        is_multimodal=False,
        num_hidden_layers=LAYERS,
        get_total_num_kv_heads=lambda: HEADS,
    )


def new_request(tokens: Any, room: int, port: int, **more: Any) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    return Req(
        secrets.token_hex(8),
        "",
        array("q", tokens),
        SamplingParams(max_new_tokens=4),
        bootstrap_host=HOST,
        bootstrap_port=port,
        bootstrap_room=room,
        **more,
    )


def new_prompt(tokens: int, before: Any = ()) -> list[int]:
    """Random tokens behind those of `before`."""
    rng = np.random.default_rng()
    return [*before, *rng.integers(0, 50_000, tokens - len(before)).tolist()]
