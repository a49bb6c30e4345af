"""Addresses on which a process listens: loopback, unless it is told that something else stands before its port."""

from __future__ import annotations

import argparse
import ipaddress
import socket
from typing import NamedTuple

from kvferry import addresses


class Listen(NamedTuple):
    """An address to listen on; as text HOST:PORT again, [V6]:PORT of an address of IPv6."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def listen(text: str) -> Listen:
    """An address from a flag, for argparse."""
    try:
        return Listen(*addresses.split(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be {error}, got {text!r}") from error


def cannot_listen(host: str, port: int) -> str:
    """Why nothing can listen there; "" where it can: gRPC would say so in lines of its own."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
            probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def is_loopback(host: str) -> bool:
    """Whether the host is loopback by itself: a name other than localhost is not looked up, since who answers for it
    may answer otherwise later."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def needs(flag: str, value: object, why: str, *, by: str = "--insecure") -> str:
    """The objection to an address that is not loopback."""
    return f"{flag} is {value}: {why}; an address that is not loopback needs {by}"


def add_insecure_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="allow a --listen that is not loopback: who reaches it needs no login, and nothing is encrypted",
    )


def problem(args: argparse.Namespace, why: str) -> str:
    """The objection to `--listen` and `--insecure`; empty: none."""
    if args.insecure or is_loopback(args.listen.host):
        return ""
    return needs("--listen", args.listen, why)
