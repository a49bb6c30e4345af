"""Requests of a client to a scripted daemon, and the namespace that they are of."""

from __future__ import annotations

import os

from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestName
from kvferry.proto import common_pb2
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout

GEOMETRY = KVGeometry(layers=2, kv_heads=1, head_dim=4, dtype="float32", page_size=4, layout=Layout.PAGE_NHD)
FACTS = common_pb2.NamespaceFacts(model="m", geometry=GEOMETRY.to_proto())


def name() -> RequestName:
    return RequestName(os.urandom(16), 1)


async def admit(client: DaemonClient, request: RequestName, tokens: int = 9) -> tuple[int, ...]:
    digests = bytes(32 * (tokens // 4))
    admitted = await client.admit(
        request, digests=digests, tokens=tokens, tail_digest=bytes(32), prefill="p", max_new_tokens=8, deadline_s=5
    )
    return admitted.pages
