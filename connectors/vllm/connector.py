"""kvferry as vLLM's KV connector.

--kv-transfer-config '{"kv_connector": "KVFerryConnector", "kv_role": "kv_producer" or "kv_consumer",
  "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"socket": "/run/kvferry/decode.sock"}}'

The producer is the prefill engine, the consumer the decode engine; `settings.Settings` has the rest of the extra
configuration, `params` what requests carry. Everything here runs on the engine's own threads and waits for nothing, but
for the copy that reads the blocks of a prompt that the prefill engine preempts, and for an adapter's files when its
first request comes: the scheduler's half decides (`scheduler_side`), the worker's half has threads of its own
(`worker_side`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.v1.core import kv_cache_utils
from vllm.v1.outputs import KVConnectorOutput

from kvferry.connectors.lookups import HeldPrefixes
from kvferry.connectors.orders import FirstToken, News, Orders
from kvferry.connectors.scheduler_decode import DecodeScheduler
from kvferry.connectors.scheduler_prefill import PrefillScheduler, first_of
from kvferry.connectors.scheduler_side import SchedulerSide
from kvferry.connectors.settings import Settings
from kvferry.connectors.vllm import facts as vllm_facts
from kvferry.connectors.vllm import versions as vllm_versions
from kvferry.connectors.vllm.block_ids import BlockIds, is_empty
from kvferry.connectors.vllm.caches import Unfit, looks_ahead
from kvferry.connectors.vllm.extra_keys import keys_of
from kvferry.connectors.vllm.other_loads import OtherLoads
from kvferry.connectors.vllm.stats import KVFerryCounters, KVFerryStats, counts_of
from kvferry.connectors.vllm.versions import Call
from kvferry.connectors.vllm.weights import weights_name
from kvferry.connectors.weights_epoch import WeightsEpoch
from kvferry.connectors.worker_session import connector_of
from kvferry.connectors.worker_side import WorkerSide
from kvferry.connectors.worker_state import Moved, Reports
from kvferry.proto import common_pb2
from kvferry.transfer.geometry.namespace import NamespaceFacts

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

vllm_versions.check(KVConnectorBase_V1, vllm.__version__)
# It is not called before a request has an image, an adapter, a salt or embeddings.
vllm_versions.check_calls(vllm.__version__, Call(kv_cache_utils, "generate_block_hash_extra_keys", 4))

_ROLES = {"kv_producer": common_pb2.ROLE_PREFILL, "kv_consumer": common_pb2.ROLE_DECODE}


@dataclass(slots=True)
class KVFerryMetadata(KVConnectorMetadata):  # type: ignore[misc]
    orders: Orders | None = None  # none: nothing, which is little for other processes' workers to read
    computes: bool = True  # a forward pass follows


NOTHING, IDLE = KVFerryMetadata(), KVFerryMetadata(computes=False)
"""What most steps of a decode engine tell, and those that compute nothing: nobody writes into them."""


@dataclass(slots=True)
class KVFerryWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    news: News

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVFerryWorkerMetadata:
        assert isinstance(other, KVFerryWorkerMetadata)
        return KVFerryWorkerMetadata(self.news.then(other.news))


@dataclass(frozen=True, slots=True)
class KVFerryFacts(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A rank's facts. The scheduler's half cannot know them: there models have not been made, which may write into
    their configuration, and of layers with unlike caches it is told one's."""

    facts: NamespaceFacts


class KVFerryConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One half of it, in the scheduler's process or the worker's. Configurations that it cannot serve are refused when
    it is made, hybrid models (several KV cache groups) among them."""

    _workers: ClassVar[dict[str, WorkerSide]] = {}
    """The worker's halves in this process, by their engine's id."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_role not in _ROLES:
            raise Unfit(f"kv_role is {transfer.kv_role!r}; an engine is kv_producer (prefill) or kv_consumer (decode)")
        try:
            self._settings = Settings.of(transfer.kv_connector_extra_config).at_rank(*vllm_facts.dp_of(vllm_config))
        except ValueError as error:
            raise Unfit(str(error)) from error
        check = vllm_facts.check_engine if role == KVConnectorRole.SCHEDULER else vllm_facts.check_config
        block_tokens = check(vllm_config, kv_cache_config)
        self._daemon_role = _ROLES[transfer.kv_role]
        self._pushes = self._daemon_role == common_pb2.ROLE_PREFILL
        self._shape = vllm_facts.shape_of(block_tokens, self._settings)
        self._engine: str = transfer.engine_id or "engine"
        self._facts = vllm_facts.facts_of(vllm_config, kv_cache_config, self._shape, self._settings)
        self._scheduler: SchedulerSide | None = None
        self._view: HeldPrefixes | None = None
        self._worker: WorkerSide | None = None
        self._reports, self._moved = Reports(), Moved()  # the worker's, once it is there: each step looks into them
        self._block_ids = BlockIds()
        self._others = OtherLoads()
        self._pool: BlockPool | None = None  # of the scheduler's half
        self._stepped = False  # the worker's half has heard of a step
        self._counted = counts_of(self._moved)  # of what vLLM has been told
        self._counted_ended = 0
        self._rank = 0  # of this process, in an engine of several
        self._first_tokens = 0  # that replies began with, and that vLLM has not been told of
        log_as_vllm()
        if role == KVConnectorRole.SCHEDULER:
            # The namespace is a guess until the workers have said theirs.
            self._view = HeldPrefixes(
                self._settings.socket, self._daemon_role, self._facts.id, timeout_s=self._settings.lookup_seconds
            )
            side = DecodeScheduler if transfer.kv_role == "kv_consumer" else PrefillScheduler
            self._scheduler = side(
                self._shape,
                self._view,
                keys_of=keys_of,
                looks_ahead=looks_ahead(vllm_config),
                epoch=WeightsEpoch(partial(weights_name, self._settings)),
                default_prefill=self._settings.prefill,
            )
            self._scheduler.shares_blocks = bool(vllm_config.cache_config.enable_prefix_caching)
            self._scheduler.put_off_seconds = self._settings.deadline_seconds / 2
            self._scheduler.now = time.monotonic

    # -- the scheduler's half --------------------------------------------------------------------------------------

    @property
    def _deciding(self) -> SchedulerSide:
        assert self._scheduler is not None, "this is the worker's half"
        return self._scheduler

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        """Called once the workers have their caches, before the first step, by rank. Unfit where ranks differ."""
        assert self._view is not None, "this is the worker's half"
        told = {rank: each.facts for rank, each in metadata.items() if isinstance(each, KVFerryFacts)}
        if told:
            self._view.set_namespace(vllm_facts.agreed(told).id)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        self._deciding.new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._others.asked(request, num_computed_tokens)
        if self._deciding.awaits(request.request_id):
            self._hear_at_once(request.request_id)
        return self._deciding.matched(request, num_computed_tokens)

    def _hear_at_once(self, request: str) -> None:
        """Hears what was found of a prompt before a step's outcome tells, where the worker's half is in this process:
        that would be two or three steps later."""
        worker = self._workers.get(self._engine)
        if worker is not None and (found := worker.reports.found(request)) is not None:
            self._deciding.hear(News(found={request: found}))

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._others.allocated(request, num_external_tokens)
        self._deciding.allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        side = self._scheduler
        assert side is not None, "this is the worker's half"
        if self._others.awaits_step:
            if self._others.step(scheduler_output.num_scheduled_tokens):
                side.hear_of_other_load()
            side.awaits_outcomes = self._others.within_steps
        computes = scheduler_output.total_num_scheduled_tokens > 0
        if self._pushes:  # only there blocks are asked for
            self._block_ids.follow(scheduler_output)
        if not ((self._pushes and computes) or scheduler_output.preempted_req_ids or side.has_orders):
            return NOTHING if computes else IDLE
        return KVFerryMetadata(
            side.step(
                scheduler_output.num_scheduled_tokens,
                tuple(scheduler_output.preempted_req_ids or ()),
                self._block_ids.of,
            ),
            computes,
        )

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        told = connector_output.kv_connector_worker_meta
        if told is not None and isinstance(told, KVFerryWorkerMetadata):
            self._deciding.hear(told.news)
        if connector_output.finished_recving:
            self._others.received(connector_output.finished_recving)
            self._deciding.received(tuple(connector_output.finished_recving))
        if connector_output.finished_sending:
            self._deciding.sent(tuple(connector_output.finished_sending))

    @property
    def decodes(self) -> bool:
        """It is a decode engine's."""
        return isinstance(self._scheduler, DecodeScheduler)

    def begin_with_first_tokens(self) -> None:
        """Keeps first tokens from now on: the engine's scheduler takes them."""
        assert isinstance(self._scheduler, DecodeScheduler)
        self._scheduler.begin_with_first_tokens()

    @property
    def has_news(self) -> bool:
        """Whether `reports_now` or `take_first_tokens` may have any."""
        worker = self._workers.get(self._engine)
        if worker is not None and (worker.reports.sent or worker.reports.received):
            return True
        return self._scheduler is not None and self._scheduler.has_first_tokens

    def reports_now(self) -> KVConnectorOutput | None:
        """What the worker's half has reported since the last step took its reports, where it is in this process. Of
        loads that failed the next step tells."""
        worker = self._workers.get(self._engine)
        told = worker.reports.take_good() if worker is not None else None
        if told is None:
            return None
        sent, received, first = told
        meta = KVFerryWorkerMetadata(News(first=first)) if first else None
        return KVConnectorOutput(
            finished_sending=sent or None, finished_recving=received or None, kv_connector_worker_meta=meta
        )

    def take_first_tokens(self) -> Sequence[tuple[Request, int]]:
        """See `DecodeScheduler.take_first_tokens`."""
        assert isinstance(self._scheduler, DecodeScheduler)
        return self._scheduler.take_first_tokens()

    def count_first_token(self) -> None:
        """A reply began with one."""
        self._first_tokens += 1

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._others.ended(request):
            self._deciding.loads_elsewhere(request.request_id)
        awaited, told = self._deciding.finished(request, block_ids[0] if block_ids else [])
        if awaited and isinstance(self._scheduler, PrefillScheduler):
            self._tell_at_once(request)
        return awaited, told

    def _tell_at_once(self, request: Request) -> None:
        """Tells the reply's first token before the next step's orders, where the worker's half is in this process."""
        first, worker = first_of(request), self._workers.get(self._engine)
        if first is not None and worker is not None:
            worker.tell(FirstToken(request.request_id, first))

    def reset_cache(self) -> bool | None:
        if self._scheduler is None:
            return None
        assert self._pool is not None, "the scheduler binds its pool before it runs"
        emptied = self._scheduler.reset(emptied=is_empty(self._pool))
        # Behind a reset the engine may sleep, its blocks taken away, before any step brings the worker an order.
        if (worker := self._workers.get(self._engine)) is not None:
            worker.give_up()
        return emptied

    # -- the worker's half -----------------------------------------------------------------------------------------

    @property
    def _working(self) -> WorkerSide:
        assert self._worker is not None, "the engine has not registered its KV caches"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        orders = vllm_facts.orders_of(self._vllm_config, self._kv_cache_config, kv_caches)
        own_part = vllm_facts.rank_geometry_of(self._vllm_config, self._facts)
        blocks = vllm_facts.block_map(kv_caches, self._kv_cache_config, self._shape, own_part, orders)
        facts = vllm_facts.with_head_runs(self._facts, self._vllm_config, blocks, own_part)
        mover = vllm_facts.mover_of(kv_caches, self._kv_cache_config, blocks)
        name = f"vllm {self._engine}"[:128]
        own = None
        if self._settings.pool == "engine":
            own = vllm_facts.own_blocks(self._vllm_config, kv_caches, self._kv_cache_config, blocks, facts.geometry)
        rank = vllm_facts.rank_of(self._vllm_config, self._engine, self._daemon_role)
        connect = connector_of(self._settings, self._daemon_role, facts.to_proto(), name, mover, own, rank)
        self._rank = 0 if rank is None else rank.rank
        self._worker = WorkerSide(self._settings, blocks, mover, connect, rank=rank)
        self._worker.start()
        self._reports, self._moved = self._worker.reports, self._worker.moved
        if self._rank == 0:  # beside other connectors nothing else says it
            self._reports.add_news(News(namespace=self._facts.id))
        self._workers[self._engine] = self._worker

    def get_handshake_metadata(self) -> KVFerryFacts | None:
        """None beside other connectors: MultiConnector hands one's word to all, and NixlConnector fails at another's.
        There the first step's news alone say the namespace; this word comes before any step, and from all ranks."""
        return KVFerryFacts(self._facts) if get_kv_transfer_group() is self else None

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Takes the step's orders in. Nothing is bound: so vLLM calls neither hook of each layer."""
        assert isinstance(connector_metadata, KVFerryMetadata)
        if (orders := connector_metadata.orders) is not None or not self._stepped:
            self._stepped = True
            self._working.take(orders or Orders())
        if not connector_metadata.computes:  # some versions have no `wait_for_save` then
            self._working.forward_done()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: loads began when the step's orders came."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a step computes no request whose load is under way."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing: whole blocks are copied when the step is over."""

    def wait_for_save(self) -> None:
        if (worker := self._worker) is not None and worker.awaits_step:
            worker.forward_done()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        if not (self._reports.sent or self._reports.received):
            return None, None
        sent, received = self._reports.take()
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._reports.take_bad()

    def build_connector_worker_meta(self) -> KVFerryWorkerMetadata | None:
        news = self._reports.take_news()
        return None if news is None else KVFerryWorkerMetadata(news)

    def get_kv_connector_stats(self) -> KVFerryStats | None:
        if self._first_tokens:
            begun, self._first_tokens = self._first_tokens, 0
            return KVFerryStats(data={"first_tokens": begun})
        if (ended := self._moved.ended) == self._counted_ended:
            return None
        self._counted_ended = ended
        counted, self._counted = self._counted, counts_of(self._moved)
        grown = KVFerryStats.between(counted, self._counted, self._rank)
        return None if grown.is_empty() else grown

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVFerryStats:
        return KVFerryStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVFerryCounters:
        return KVFerryCounters(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._worker is not None:
            self._workers.pop(self._engine, None)
            self._worker.close()
            self._worker = None
        if self._view is not None:
            self._view.close()
            self._view = None


def log_as_vllm() -> None:
    """Has kvferry's messages in vLLM's log, in its format and from its level on, where nobody has set them up."""
    ours, theirs = logging.getLogger("kvferry"), logging.getLogger("vllm")
    if not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate
