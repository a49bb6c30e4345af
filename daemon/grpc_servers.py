"""The daemon's two gRPC servers: on TCP for peers and front ends, on a Unix socket for this machine. Shell."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from kvferry import listening
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.values import ConfigError, parse_address
from kvferry.daemon.observe.rpc_times import RpcTimes
from kvferry.daemon.peers.gate import PeerGate
from kvferry.daemon.peers.handshake import SERVER_OPTIONS
from kvferry.daemon.peers.tls import TlsWatch
from kvferry.daemon.socket_file import SocketFile

CALLS_PER_CLIENT = 4  # of a peer or a worker: its session, the one before it that still ends, its health and statistics
MORE_CALLS = 4096  # of anybody: look-ups, statistics, health and watches of it


@dataclass(frozen=True, slots=True)
class GrpcServers:
    tcp: grpc.aio.Server
    unix: grpc.aio.Server

    def bind_tcp(self, listen: str, tls: TlsWatch | None) -> str:
        """The HOST:PORT that it listens at. ConfigError where it cannot."""
        host, port = parse_address(listen)
        if why := listening.cannot_listen(host, port):
            raise ConfigError(f"--listen {listen}: {why}")
        try:
            if tls is None:
                bound = self.tcp.add_insecure_port(listen)
            else:
                bound = self.tcp.add_secure_port(listen, tls.server_credentials())
        except RuntimeError as error:
            raise ConfigError(f"--listen {listen}: {error}") from error
        if port and bound != port:
            raise ConfigError(f"--listen {listen}: the port is taken")
        return f"{host if ':' not in host else f'[{host}]'}:{bound}"

    def bind_unix(self, path: str) -> SocketFile:
        """Binds the Unix socket, for this user alone."""
        before = os.umask(0o177)
        try:
            self.unix.add_insecure_port(f"unix:{path}")
        finally:
            os.umask(before)
        return SocketFile(path)

    def reflect(self, tcp: Sequence[str], unix: Sequence[str]) -> None:
        """Tells clients which services there are."""
        from grpc_reflection.v1alpha import reflection

        for server, services in ((self.tcp, tcp), (self.unix, unix)):
            reflection.enable_server_reflection([*services, reflection.SERVICE_NAME], server)

    async def start(self) -> None:
        await self.tcp.start()
        await self.unix.start()

    async def stop(self, grace: float) -> None:
        """`grace`: seconds for the calls that run."""
        await asyncio.gather(self.unix.stop(grace), self.tcp.stop(grace))


def make_servers(config: DaemonConfig, rpcs: RpcTimes, tls: TlsWatch | None) -> GrpcServers:
    timed = [rpcs]
    gated = timed if tls is None else [*timed, PeerGate(config.name, config.tls_peers)]
    tcp, unix = (
        grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS, maximum_concurrent_rpcs=most_calls(most))
        for interceptors, most in ((gated, config.max_peers), (timed, config.worker_processes))
    )
    return GrpcServers(tcp, unix)


def most_calls(clients: int) -> int:
    """Calls of a server at a time, sessions among them; gRPC refuses more with RESOURCE_EXHAUSTED."""
    return CALLS_PER_CLIENT * clients + MORE_CALLS
