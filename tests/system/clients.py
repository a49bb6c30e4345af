"""Clients of real daemons that hold pages."""

from __future__ import annotations

import os

from kvferry.client.client import DaemonClient
from kvferry.client.requests import RequestName
from kvferry.daemon.cli.system import Replica
from kvferry.proto import common_pb2
from kvferry.radix.digests import prompt_digests
from tests.support.engines import describe


async def client_with_pages(replica: Replica) -> DaemonClient:
    """A worker of a decode daemon with a request of 100 tokens, in 7 pages."""
    client = await DaemonClient.connect(replica.socket, common_pb2.ROLE_DECODE, describe(replica).facts, "test")
    prompt = prompt_digests(list(range(100)), page_size=16)
    name = RequestName(os.urandom(16), 1)
    await client.admit(
        name,
        digests=prompt.digests,
        tokens=100,
        tail_digest=prompt.tail,
        prefill="",
        max_new_tokens=5,
        deadline_s=10,
    )
    await client.ready(name)
    return client
