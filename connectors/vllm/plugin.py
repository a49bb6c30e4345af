"""vLLM's way to find the connector by its name alone: it calls `register` in each of its processes, as the entry point
`kvferry` of the group vllm.general_plugins."""

from __future__ import annotations

CONNECTOR = "KVFerryConnector"


def register() -> None:
    """Makes `"kv_connector": "KVFerryConnector"` known. Nothing of kvferry is imported until it is asked for."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, "kvferry.connectors.vllm", CONNECTOR)
    except ValueError:  # there already: vLLM loads plugins several times in one process
        KVConnectorFactory.get_connector_class_by_name(CONNECTOR)
