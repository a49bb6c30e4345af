"""The scheduler's half of the connector has the namespace that the workers' halves say. Of vLLM there is what they
import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import kvferry.connectors.vllm
from kvferry.connectors.orders import News
from kvferry.connectors.vllm.caches import Unfit
from kvferry.connectors.vllm.facts import agreed
from kvferry.connectors.vllm.versions import TESTED, InterfaceDiffers
from kvferry.transfer.geometry.namespace import NamespaceFacts
from tests.connectors.scheduling import Daemon
from tests.connectors.vllm.test_caches import BLOCK, LATENT, NAMES, MLAAttentionSpec, drafts, engine, kv
from tests.connectors.vllm.test_versions import base_with

RANKS = 2
OURS = "kvferry.connectors.vllm."
OF_VLLM = ("connector", "stats")  # of ours, those that import it
SCHEDULER, WORKER = "scheduler", "worker"


class Base(base_with()):  # type: ignore[misc]
    """vLLM's KVConnectorBase_V1."""

    def __init__(self, vllm_config: object, role: str, kv_cache_config: object) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config


@dataclass
class Stats:
    """vLLM's KVConnectorStats."""

    data: dict[str, Any] = field(default_factory=dict)


class View(Daemon):
    """In the place of HeldPrefixes."""

    def __init__(self, socket: str, role: int, namespace_id: bytes, *, timeout_s: float) -> None:
        super().__init__(namespaces=[namespace_id])


@dataclass
class Process:
    """What the process of a worker has of vLLM, which is one for all here."""

    group: object = None  # the connector, or MultiConnector that has it
    rank: int = 0


def extra_keys(request: object, start: int, end: int, mm: int) -> None:
    """vLLM's generate_block_hash_extra_keys."""


UTILS = SimpleNamespace(generate_block_hash_extra_keys=extra_keys)  # vLLM's kv_cache_utils


@contextmanager
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    """Nothing of it is left behind `monkeypatch` and this."""
    made, transfer = Process(), "vllm.distributed.kv_transfer"
    names = ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata", "SupportsHMA")
    parts = {name: type(name, (), {}) for name in (*names, "KVConnectorPromMetrics")} | {"KVConnectorStats": Stats}
    told: dict[str, dict[str, object]] = {
        "vllm": {"__version__": TESTED[-1]},
        transfer: {"get_kv_transfer_group": lambda: made.group},
        "vllm.distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: made.rank},
        f"{transfer}.kv_connector.v1.base": {
            **{name: parts[name] for name in names},
            "KVConnectorBase_V1": Base,
            "KVConnectorRole": SimpleNamespace(SCHEDULER=SCHEDULER, WORKER=WORKER),
        },
        f"{transfer}.kv_connector.v1.metrics": {name: parts[name] for name in parts if name not in names},
        "vllm.v1.core": {"kv_cache_utils": UTILS},
        "vllm.v1.metrics.utils": {"create_metric_per_engine": None},
        "vllm.v1.outputs": {"KVConnectorOutput": SimpleNamespace},
    }
    for path in told:
        for end in range(path.count(".") + 1):
            module = ModuleType(".".join(path.split(".")[: end + 1]))
            if module.__name__ not in told or module.__name__ == path:
                vars(module).update(told.get(module.__name__, {}))
                monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in OF_VLLM:
        monkeypatch.delitem(sys.modules, OURS + name, raising=False)
        monkeypatch.setattr(kvferry.connectors.vllm, name, None, raising=False)  # the import sets it, too
    try:
        monkeypatch.setattr(importlib.import_module(OURS + "connector"), "HeldPrefixes", View)
        yield made
    finally:
        for name in OF_VLLM:
            sys.modules.pop(OURS + name, None)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    with with_vllm(monkeypatch) as made:
        yield made


def half(role: str, **written: object) -> Any:
    """A half of the connector, in a process whose models have written that into the draft model's configuration."""
    config = engine(ranks=RANKS, draft=(draft := drafts("eagle3")), enable_prefix_caching=True)
    given = draft.draft_model_config.hf_config.to_dict()
    draft.draft_model_config.hf_config = SimpleNamespace(to_dict=lambda: {**given, **written})
    vars(config.parallel_config).update(data_parallel_index=0, data_parallel_size=1)
    config.model_config.is_multimodal_model = False
    extra = {"socket": "/s", "revision": "1", "connect_seconds": 0.01}
    config.kv_transfer_config = SimpleNamespace(kv_role="kv_consumer", kv_connector_extra_config=extra, engine_id="e")
    return sys.modules[OURS + "connector"].KVFerryConnector(config, role, kv(MLAAttentionSpec()))


@contextmanager
def registered(worker: Any) -> Iterator[None]:
    """The worker's half has its caches; no daemon is there."""
    worker._vllm_config.device_config.device_type = "cpu"
    try:
        worker.register_kv_caches({name: torch.zeros(2, BLOCK, LATENT, dtype=torch.bfloat16) for name in NAMES})
        yield
    finally:
        worker.shutdown()


def said(process: Process, worker: Any) -> Any:
    """What vLLM brings the scheduler's process of a worker, whose only connector it is."""
    process.group = worker
    return worker.get_handshake_metadata()


def test_the_schedulers_half_looks_where_the_workers_keep(process: Process) -> None:
    scheduler = half(SCHEDULER)
    workers = [half(WORKER, target_layer_count=32) for _ in range(RANKS)]
    scheduler.set_xfer_handshake_metadata({rank: said(process, worker) for rank, worker in enumerate(workers)})
    guessed, last = scheduler._view.namespaces
    assert guessed != last == workers[0]._facts.id


def test_ranks_that_disagree_are_refused_by_name(process: Process) -> None:
    scheduler = half(SCHEDULER)
    told = {rank: said(process, half(WORKER, target_layer_count=32 + rank)) for rank in range(RANKS)}
    with pytest.raises(Unfit, match=r"on rank 1 speculative is eagle3 .*, eagle3 .* on rank 0: give all ranks of an"):
        scheduler.set_xfer_handshake_metadata(told)
    assert len(scheduler._view.namespaces) == 1


def test_whatever_ranks_disagree_in_is_named(process: Process) -> None:
    one: NamespaceFacts = half(WORKER)._facts
    assert agreed({0: one, 1: replace(one)}) == one
    with pytest.raises(Unfit, match=r"on rank 1 model is m, vllm-deepseek_v3-.* on rank 0; revision is 2, 1 on rank 0"):
        agreed({0: one, 1: replace(one, model="m", revision="2")})
    with pytest.raises(Unfit, match=r"on rank 3 revision is 2, 1 on rank 2: give all ranks of an"):
        agreed({3: replace(one, revision="2"), 2: one})


def test_beside_other_connectors_the_first_steps_news_say_it(process: Process) -> None:
    """MultiConnector hands what one of them says to all, and NixlConnector fails at what another says."""
    scheduler, module = half(SCHEDULER), sys.modules[OURS + "connector"]
    whole = module.KVFerryWorkerMetadata(News())
    for process.rank in range(RANKS):
        worker = half(WORKER, target_layer_count=32)
        process.group = SimpleNamespace(_connectors=[worker, object()])
        with registered(worker):
            assert worker.get_handshake_metadata() is None
            told = worker.build_connector_worker_meta()
            assert told.news.sessions == {process.rank: False}
            whole = whole.aggregate(told)
    scheduler.set_xfer_handshake_metadata({0: object()})
    told = SimpleNamespace(kv_connector_worker_meta=whole, finished_recving=None, finished_sending=None)
    scheduler.update_connector_output(told)
    assert scheduler._view.namespaces[1:] == [worker._facts.id]


def test_the_schedulers_half_hears_of_what_other_connectors_load(process: Process) -> None:
    scheduler = half(SCHEDULER)
    step = SimpleNamespace(num_scheduled_tokens={"a": 1}, total_num_scheduled_tokens=1, preempted_req_ids=None)
    for computed, named in ((16, True), (40, False)):
        scheduler._scheduler._epoch.name = "step 7"
        request = SimpleNamespace(request_id="a", num_computed_tokens=computed)
        scheduler._others.asked(request, 16)
        scheduler._others.allocated(request, 0)
        scheduler.build_connector_meta(step)
        assert bool(scheduler._scheduler._epoch.name) is named


def test_what_names_tokens_beside_their_ids_is_looked_for_before_a_request_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(UTILS, "generate_block_hash_extra_keys")
    with (
        pytest.raises(InterfaceDiffers, match=r"vllm\.generate_block_hash_extra_keys is not there"),
        with_vllm(monkeypatch),
    ):
        pass


def test_of_a_vllm_that_is_none_nothing_is_left() -> None:
    def there() -> dict[str, object]:
        ours = {name: vars(kvferry.connectors.vllm).get(name) for name in OF_VLLM}
        return ours | {name: module for name, module in sys.modules.items() if f"{name}.".startswith("vllm.")}

    before = there()
    with pytest.MonkeyPatch.context() as patch, with_vllm(patch):
        assert half(SCHEDULER) is not None and there() != before
    assert there() == before
