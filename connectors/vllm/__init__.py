"""kvferry as vLLM's KV connector: vLLM is given this package's name and takes `KVFerryConnector` from it.

Its own modules are imported late: what is read of vLLM's configuration (`facts`, `order`) needs no vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.connectors.vllm.connector import KVFerryConnector

__all__ = ["KVFerryConnector"]


def __getattr__(name: str) -> type[KVFerryConnector]:
    """The connector's class, once it is asked for."""
    if name != "KVFerryConnector":
        raise AttributeError(f"{__name__} has no {name}")
    from kvferry.connectors.vllm.connector import KVFerryConnector

    return KVFerryConnector
