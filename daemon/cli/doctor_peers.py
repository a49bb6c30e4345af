"""The checks of `kvferry doctor` for each --peer: whether it is reached, and whether a session with it can be.
Shell."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator

import grpc

from kvferry.channels import ChannelError, ClientTls, open_channel
from kvferry.daemon.cli.findings import BAD, NOTE, OK, Finding
from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.values import parse_address, size
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common
from kvferry.proto.versions import PROTOCOL, PROTOCOL_MIN

CONNECT_SECONDS = 3.0


def peers(config: DaemonConfig) -> Iterator[Finding]:
    """Whether each prefill daemon is reached, and speaks the protocol that a session needs."""
    for name, address in config.peers.items():
        yield _peer(config, name, address)


def _peer(config: DaemonConfig, name: str, address: str) -> Finding:
    what = f"peer {name} {address}"
    host, port = parse_address(address)
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS):
            pass
    except OSError as error:
        remedy = "is it started, with --listen on an address that this node reaches? firewall, network policy, DNS?"
        return Finding(BAD, what, f"cannot be reached: {error.strerror or error}", remedy)
    try:
        with open_channel(address, _client_tls(config)) as channel:
            stats = fetch(channel)
    except ChannelError as error:
        return Finding(BAD, what, str(error), "see TLS above")
    except grpc.RpcError as error:
        if config.tls_cert:
            remedy = _tls_remedy(config, host, port)
            return Finding(BAD, what, f"{error.code().name}: {error.details()}", remedy)
        remedy = "is that port a kvferry daemon's --listen (not its metrics or a worker)?"
        return Finding(BAD, what, f"{error.code().name}: {error.details()}", remedy)
    protocol = stats.build.protocol
    if not PROTOCOL_MIN <= protocol <= PROTOCOL:
        text = f"speaks protocol {protocol}, this release {PROTOCOL_MIN} to {PROTOCOL}"
        return Finding(BAD, what, text, "install releases of kvferry at most one protocol apart")
    side = next((side for side in stats.sides if side.role == common.ROLE_PREFILL), None)
    if side is None:
        return Finding(BAD, what, "is no prefill daemon", "check --peer here and --role there")
    if side.digests.page_size not in (0, config.page_size):  # the handshake would refuse it
        text = f"pages of {side.digests.page_size} tokens; here --page-size is {config.page_size}"
        return Finding(BAD, what, text, "start both daemons with the same --page-size")
    if stats.daemon != name:
        remedy = f"one name in --peer, in --name there and where requests name it; now that must be {name!r}"
        return Finding(NOTE, what, f"calls itself {stats.daemon!r}", remedy)
    if not side.pool.pages:
        return Finding(NOTE, what, "has no worker yet, so its model is not known", "start its prefill worker")
    text = f"{stats.daemon}, kvferry {stats.build.version}, protocol {protocol}, {_pages(side)}"
    return Finding(OK, what, text)


def _pages(side: cache.SideStats) -> str:
    nbytes = size(side.pool.page_bytes).replace(".0 ", " ")
    return f"pages of {side.digests.page_size} tokens ({nbytes})" if side.digests.page_size else f"pages of {nbytes}"


def _client_tls(config: DaemonConfig) -> ClientTls | None:
    return ClientTls(config.tls_ca, config.tls_cert, config.tls_key) if config.tls_cert else None


def _tls_remedy(config: DaemonConfig, host: str, port: int) -> str:
    """The cause that a handshake tells and gRPC's own message does not."""
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
        context.load_cert_chain(config.tls_cert, config.tls_key)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, port), CONNECT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            # In TLS 1.3 a client's certificate is judged after its handshake; gRPC then closes without a word.
            if not secured.recv(1):
                return "it does not believe this daemon's certificate: is its authority in --tls-ca there?"
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not believed here: {error.verify_message}"
    except ssl.SSLError as error:
        return f"the handshake fails ({error.reason or error}): does it have TLS?"
    except OSError as error:
        return f"the handshake breaks off ({error}): does it have TLS?"
    return "the handshake is fine: is that port a kvferry daemon's --listen?"
