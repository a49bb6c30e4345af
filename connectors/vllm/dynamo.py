"""Dynamo's vLLM worker knows connectors by a registry of its own, `dynamo.vllm.kv_connector_protocols`; here is
kvferry's entry, for a connector of that name or a MultiConnector's child of it.

Dynamo asks prefill first: the request's name is made here, and decode gets what prefill's answer says, or nothing where
its pages are not sent, and then computes the prompt itself.
"""

from __future__ import annotations

import secrets
from typing import Any

from kvferry.proto.limits import REQUEST_ID_BYTES


def register(name: str) -> None:
    """Makes the connector known to the worker in whose process this is. ImportError where Dynamo has no such registry
    (before 1.2)."""
    from dynamo.vllm import kv_connector_protocols as known

    class KVFerryProtocol(known.KvConnectorProtocol):  # type: ignore[misc]
        """`kv_transfer_params` of one request, whose two halves they name."""

        def prefill_request_kv_transfer_params(self) -> dict[str, Any]:
            return {"do_remote_decode": True, "kvferry_request": secrets.token_hex(REQUEST_ID_BYTES)}

        def decode_request_kv_transfer_params(self, prefill_response: Any) -> dict[str, Any] | None:
            params: dict[str, Any] | None = prefill_response.kv_transfer_params
            return params

    known.KV_CONNECTOR_PROTOCOLS.setdefault(name, KVFerryProtocol)
