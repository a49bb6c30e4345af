"""The dialling of other daemons: over mutual TLS where this one has certificates. Shell.

Only addresses of the settings, and those that DNS has for `--peer-service`, are ever given to it.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc

from kvferry.channels import expecting
from kvferry.daemon.peers.handshake import CHANNEL_OPTIONS
from kvferry.daemon.peers.tls import TlsWatch

# (HOST:PORT, HOST:PORT of the name that the certificate there must have; empty: the address's own host)
Dial = Callable[[str, str], grpc.aio.Channel]


def dial_plainly(address: str, expected: str) -> grpc.aio.Channel:
    del expected
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def dialling(watch: TlsWatch | None) -> Dial:
    """A dial with the certificates as they are each time."""
    if watch is None:
        return dial_plainly

    def dial(address: str, expected: str) -> grpc.aio.Channel:
        options = [*CHANNEL_OPTIONS, *expecting(expected)]
        return grpc.aio.secure_channel(address, watch.channel_credentials(), options=options)

    return dial
