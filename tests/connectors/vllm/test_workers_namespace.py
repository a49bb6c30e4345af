"""The scheduler's half of the connector has the namespace that the workers' halves say. Of vLLM there is what they
import."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvferry.connectors.orders import News
from kvferry.connectors.vllm.caches import Unfit
from kvferry.connectors.vllm.facts import agreed
from kvferry.connectors.vllm.versions import TESTED
from kvferry.transfer.geometry.namespace import NamespaceFacts
from tests.connectors.scheduling import Daemon
from tests.connectors.vllm.test_caches import MLAAttentionSpec, drafts, engine, kv
from tests.connectors.vllm.test_versions import base_with

RANKS = 2
OURS = "kvferry.connectors.vllm."
SCHEDULER, WORKER = "scheduler", "worker"


class Base(base_with()):  # type: ignore[misc]
    """vLLM's KVConnectorBase_V1."""

    def __init__(self, vllm_config: object, role: str, kv_cache_config: object) -> None:
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config


class View(Daemon):
    """In the place of HeldPrefixes."""

    def __init__(self, socket: str, role: int, namespace_id: bytes, *, timeout_s: float) -> None:
        super().__init__(looked_in=[namespace_id])


@dataclass
class Process:
    """What the process of a worker has of vLLM, which is one for all here."""

    group: object = None  # the connector, or MultiConnector that has it


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    made, transfer = Process(), "vllm.distributed.kv_transfer"
    names = ("KVConnectorHandshakeMetadata", "KVConnectorMetadata", "KVConnectorWorkerMetadata", "SupportsHMA")
    parts = {name: type(name, (), {}) for name in (*names, "KVConnectorPromMetrics", "KVConnectorStats")}
    told: dict[str, dict[str, object]] = {
        "vllm": {"__version__": TESTED[-1]},
        transfer: {"get_kv_transfer_group": lambda: made.group},
        f"{transfer}.kv_connector.v1.base": {
            **{name: parts[name] for name in names},
            "KVConnectorBase_V1": Base,
            "KVConnectorRole": SimpleNamespace(SCHEDULER=SCHEDULER, WORKER=WORKER),
        },
        f"{transfer}.kv_connector.v1.metrics": {name: parts[name] for name in parts if name not in names},
        "vllm.v1.metrics.utils": {"create_metric_per_engine": None},
        "vllm.v1.outputs": {"KVConnectorOutput": SimpleNamespace},
    }
    for path in told:
        for end in range(path.count(".") + 1):
            module = ModuleType(".".join(path.split(".")[: end + 1]))
            if module.__name__ not in told or module.__name__ == path:
                vars(module).update(told.get(module.__name__, {}))
                monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("connector", "stats"):
        monkeypatch.delitem(sys.modules, OURS + name, raising=False)
    try:
        monkeypatch.setattr(importlib.import_module(OURS + "connector"), "HeldPrefixes", View)
        yield made
    finally:
        for name in ("connector", "stats"):
            sys.modules.pop(OURS + name, None)


def half(role: str, **written: object) -> Any:
    """A half of the connector, in a process whose models have written that into the draft model's configuration."""
    config = engine(ranks=RANKS, draft=(draft := drafts("eagle3")), enable_prefix_caching=True)
    given = draft.draft_model_config.hf_config.to_dict()
    draft.draft_model_config.hf_config = SimpleNamespace(to_dict=lambda: {**given, **written})
    vars(config.parallel_config).update(data_parallel_index=0, data_parallel_size=1)
    config.model_config.is_multimodal_model = False
    extra = {"socket": "/s", "revision": "1"}
    config.kv_transfer_config = SimpleNamespace(kv_role="kv_consumer", kv_connector_extra_config=extra, engine_id="e")
    return sys.modules[OURS + "connector"].KVFerryConnector(config, role, kv(MLAAttentionSpec()))


def said(process: Process, worker: Any) -> Any:
    """What vLLM brings the scheduler's process of a worker, whose only connector it is."""
    process.group = worker
    return worker.get_handshake_metadata()


def test_the_schedulers_half_looks_where_the_workers_keep(process: Process) -> None:
    scheduler = half(SCHEDULER)
    workers = [half(WORKER, target_layer_count=32) for _ in range(RANKS)]
    scheduler.set_xfer_handshake_metadata({rank: said(process, worker) for rank, worker in enumerate(workers)})
    guessed, last = scheduler._view.looked_in
    assert guessed != last == workers[0]._facts.id


def test_ranks_that_disagree_are_refused_by_name(process: Process) -> None:
    scheduler = half(SCHEDULER)
    told = {rank: said(process, half(WORKER, target_layer_count=32 + rank)) for rank in range(RANKS)}
    with pytest.raises(Unfit, match=r"on rank 1 speculative is eagle3 .*, eagle3 .* on rank 0: give all ranks of an"):
        scheduler.set_xfer_handshake_metadata(told)
    assert len(scheduler._view.looked_in) == 1


def test_whatever_ranks_disagree_in_is_named(process: Process) -> None:
    one: NamespaceFacts = half(WORKER)._facts
    assert agreed({0: one, 1: replace(one)}) == one
    with pytest.raises(Unfit, match=r"on rank 1 model is m, vllm-deepseek_v3-.* on rank 0; revision is 2, 1 on rank 0"):
        agreed({0: one, 1: replace(one, model="m", revision="2")})


def test_beside_other_connectors_the_first_steps_news_say_it(process: Process) -> None:
    """MultiConnector hands what one of them says to all, and NixlConnector fails at what another says."""
    worker = half(WORKER, target_layer_count=32)
    process.group = SimpleNamespace(_connectors=[worker, object()])
    assert worker.get_handshake_metadata() is None
    scheduler = half(SCHEDULER)
    scheduler.set_xfer_handshake_metadata({0: object()})
    module = sys.modules[OURS + "connector"]
    news = News(namespace=worker._facts.id).then(News(sessions={1: True}))
    meta = module.KVFerryWorkerMetadata(news).aggregate(module.KVFerryWorkerMetadata(News()))
    told = SimpleNamespace(kv_connector_worker_meta=meta, finished_recving=None, finished_sending=None)
    scheduler.update_connector_output(told)
    assert scheduler._view.looked_in[1:] == [worker._facts.id]
