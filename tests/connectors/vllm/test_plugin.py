"""vLLM finds the connector by its name alone."""

from __future__ import annotations

import importlib.metadata
import sys
from types import ModuleType

import pytest

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


def test_the_entry_point_makes_the_name_known_however_often_it_is_called(factory: type[KVConnectorFactory]) -> None:
    found = importlib.metadata.entry_points(group="vllm.general_plugins", name="kvferry")
    if not found:
        pytest.skip("kvferry is not installed here: its folders lie beside each other")
    (register,) = {entry.load() for entry in found}
    register()
    register()
    assert factory.known == {"KVFerryConnector": ("kvferry.connectors.vllm", "KVFerryConnector")}
