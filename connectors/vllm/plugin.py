"""vLLM's way to find the connector by its name alone: it calls `register` in each of its processes, as the entry point
`kvferry` of the group vllm.general_plugins."""

from __future__ import annotations

import contextlib
import sys

CONNECTOR = "KVFerryConnector"


def register() -> None:
    """Makes `"kv_connector": "KVFerryConnector"` known. Nothing of kvferry is imported until it is asked for."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    with contextlib.suppress(ValueError):  # known already: a process may load its plugins more than once
        KVConnectorFactory.register_connector(CONNECTOR, "kvferry.connectors.vllm", CONNECTOR)
    if "dynamo.vllm" in sys.modules:  # this is the process of a worker of Dynamo's
        from kvferry.connectors.vllm import dynamo

        with contextlib.suppress(ImportError):
            dynamo.register(CONNECTOR)
