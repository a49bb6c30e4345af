"""`kv_transfer_params` of a request: what a router passes to the two halves of a request.

To prefill: {"do_remote_decode": true, "kvferry_request": "<32 hex digits>"}; to decode: {"do_remote_prefill": true,
"kvferry_request": the same, "kvferry_prefill": "<name of the prefill daemon>"}. Both may be sent at once. A router that
asks prefill first may leave the id out, and passes on what prefill's answer says.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.client.requests import RequestName
from kvferry.proto.limits import MAX_ATTEMPT, MAX_NAME_CHARS, REQUEST_ID_BYTES


@dataclass(frozen=True, slots=True)
class TransferParams:
    name: RequestName
    prefill: str = ""  # of the decode half: the prefill daemon


def new_name() -> RequestName:
    return RequestName(secrets.token_bytes(REQUEST_ID_BYTES), 1)


def prefill_half(params: object) -> TransferParams | None:
    """The params of a prefill half; None: its pages are not to be sent. ValueError names the field, its value and the
    bound."""
    params = _checked(params)
    if not params.get("do_remote_decode"):
        return None
    return TransferParams(_name(params) if "kvferry_request" in params else new_name())


def decode_half(params: object, default_prefill: str) -> TransferParams | None:
    """The params of a decode half; None: nobody prefills for it. ValueError names the field, its value and the
    bound."""
    params = _checked(params)
    if not params.get("do_remote_prefill"):
        return None
    prefill = params.get("kvferry_prefill") or default_prefill
    if not isinstance(prefill, str) or not 1 <= len(prefill) <= MAX_NAME_CHARS:
        raise ValueError(f"kvferry_prefill is {str(prefill)[:64]!r}; it must name a prefill daemon")
    return TransferParams(_name(params), prefill)


def answer(params: TransferParams, prefill: str, first: int | None) -> dict[str, object]:
    """The `kv_transfer_params` of prefill's answer, for routers that ask it first. first: the reply's first token."""
    told: dict[str, object] = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "kvferry_request": params.name.request_id.hex(),
        "kvferry_attempt": params.name.attempt,
    }
    if first is not None:
        told["kvferry_first_token"] = first
    return {**told, "kvferry_prefill": prefill} if prefill else told


def _checked(params: object) -> Mapping[str, object]:
    """Params as they may be: clients have ways to send anything."""
    if params is None:
        return {}
    if not isinstance(params, Mapping):
        raise ValueError(f"kv_transfer_params is {str(params)[:64]!r}; it must be an object")
    return params


def _name(params: Mapping[str, object]) -> RequestName:
    text, attempt = params.get("kvferry_request"), params.get("kvferry_attempt", 1)
    try:
        request_id = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        request_id = b""
    if len(request_id) != REQUEST_ID_BYTES:
        raise ValueError(f"kvferry_request is {str(text)[:64]!r}; it must be {2 * REQUEST_ID_BYTES} hexadecimal digits")
    if isinstance(attempt, bool) or not isinstance(attempt, int) or not 1 <= attempt <= MAX_ATTEMPT:
        raise ValueError(f"kvferry_attempt is {str(attempt)[:64]!r}; it must be 1 to {MAX_ATTEMPT}")
    return RequestName(request_id, attempt)
