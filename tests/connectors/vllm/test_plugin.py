"""vLLM finds the connector by its name alone."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from kvferry.connectors.params import prefill_half
from kvferry.connectors.vllm import plugin

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"


class KVConnectorFactory:
    """vLLM's, as far as it is asked."""

    known: dict[str, tuple[str, str]] = {}  # noqa: RUF012

    @classmethod
    def register_connector(cls, name: str, module_path: str, class_name: str) -> None:
        if name in cls.known:
            raise ValueError(f"Connector '{name}' is already registered.")
        cls.known[name] = module_path, class_name


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> type[KVConnectorFactory]:
    for name in FACTORY.split("."):
        path = FACTORY[: FACTORY.index(name) + len(name)]
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    sys.modules[FACTORY].KVConnectorFactory = KVConnectorFactory  # type: ignore[attr-defined]
    monkeypatch.setattr(KVConnectorFactory, "known", {})
    return KVConnectorFactory


class KvConnectorProtocol:
    """Dynamo's, of one prefill request."""

    def __init__(self, vllm_config: object) -> None: ...


@pytest.fixture
def dynamo(monkeypatch: pytest.MonkeyPatch) -> dict[str, type[KvConnectorProtocol]]:
    """The registry of a process that is a worker of Dynamo's."""
    for path in ("dynamo", "dynamo.vllm", "dynamo.vllm.kv_connector_protocols"):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    anything: Any = sys.modules["dynamo.vllm.kv_connector_protocols"]
    anything.KvConnectorProtocol, anything.KV_CONNECTOR_PROTOCOLS = KvConnectorProtocol, {}
    sys.modules["dynamo.vllm"].kv_connector_protocols = anything  # type: ignore[attr-defined]
    registry: dict[str, type[KvConnectorProtocol]] = anything.KV_CONNECTOR_PROTOCOLS
    return registry


def test_dynamos_worker_hears_of_it(
    factory: type[KVConnectorFactory], dynamo: dict[str, type[KvConnectorProtocol]]
) -> None:
    plugin.register()
    (known,) = dynamo.items()
    plugin.register()
    assert list(dynamo.items()) == [known] and known[0] == "KVFerryConnector"
    first, second = (cast(Any, known[1](None)).prefill_request_kv_transfer_params() for _ in range(2))
    halves = [prefill_half(params) for params in (first, second)]
    assert None not in halves and halves[0] != halves[1], "each request has a name of its own"
    answer = SimpleNamespace(kv_transfer_params={"do_remote_prefill": True})
    protocol: Any = known[1](None)
    assert protocol.decode_request_kv_transfer_params(answer) == {"do_remote_prefill": True}
    assert protocol.decode_request_kv_transfer_params(SimpleNamespace(kv_transfer_params=None)) is None


def test_a_worker_of_a_dynamo_without_a_registry_starts_as_well(
    factory: type[KVConnectorFactory], monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in ("dynamo", "dynamo.vllm"):
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    plugin.register()
    assert "KVFerryConnector" in factory.known


def test_the_entry_point_makes_the_name_known_however_often_it_is_called(factory: type[KVConnectorFactory]) -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvferry")
    if not found:
        pytest.skip("kvferry is not installed here: its folders lie beside each other")
    (register,) = {entry.load() for entry in found}
    register()
    register()
    assert factory.known == {"KVFerryConnector": ("kvferry.connectors.vllm", "KVFerryConnector")}
