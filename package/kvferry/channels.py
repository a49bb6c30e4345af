"""gRPC channels to a daemon's address, for its clients: over TLS where they were given certificates.

A Unix socket is never TLS. Files are read when a channel is opened: what replaces them counts for the next one.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc
import grpc.aio

MAX_FILE_BYTES = 1 << 20
Options = Sequence[tuple[str, object]]
NO_PROXY = ("grpc.enable_http_proxy", 0)


class ChannelError(ValueError):
    """The files for TLS are not all given, or cannot be read; names the flag."""


@dataclass(frozen=True, slots=True)
class ClientTls:
    """`name`: that the daemon's certificate has, where it is not the host of the address; empty: that host."""

    ca: str
    cert: str
    key: str
    name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """ChannelError where a file cannot be read."""
        return grpc.ssl_channel_credentials(
            _read("--tls-ca", self.ca), _read("--tls-key", self.key), _read("--tls-cert", self.cert)
        )


def _read(flag: str, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES)
    except OSError as error:
        raise ChannelError(f"{flag} {path}: {error.strerror or error}") from error


def add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("TLS, to a daemon that has it (all three, or none)")
    for word, what in (
        ("ca", "certificates of the authorities that the daemon's is checked against"),
        ("cert", "this client's certificate"),
        ("key", "its key"),
    ):
        group.add_argument(f"--tls-{word}", metavar="FILE", help=f"{what} (default: $KVFERRY_TLS_{word.upper()})")
    group.add_argument(
        "--tls-name", default="", metavar="NAME", help="of the daemon's certificate (default: the address's host)"
    )


def tls_of(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> ClientTls | None:
    """The TLS of a client's flags; None where no file is given. ChannelError where only some are."""
    environ = os.environ if environ is None else environ
    found = {
        f"--tls-{word}": getattr(args, f"tls_{word}") or environ.get(f"KVFERRY_TLS_{word.upper()}", "")
        for word in ("ca", "cert", "key")
    }
    missing = [flag for flag, path in found.items() if not path]
    if len(missing) == len(found):
        if args.tls_name:
            raise ChannelError(f"--tls-name is {args.tls_name!r}, but there is no TLS: it takes {', '.join(found)}")
        return None
    if missing:
        raise ChannelError(f"{' and '.join(missing)} not given: TLS takes all of {', '.join(found)}")
    ca, cert, key = found.values()
    return ClientTls(ca, cert, key, name=args.tls_name)


def open_channel(address: str, tls: ClientTls | None, options: Options = ()) -> grpc.Channel:
    """A channel to `address`, HOST:PORT or unix:PATH, through no proxy. ChannelError."""
    options = [*options, NO_PROXY]
    if tls is None or address.startswith("unix:"):
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, tls.credentials(), [*options, *expecting(tls.name)])


def open_aio_channel(address: str, tls: ClientTls | None, options: Options = ()) -> grpc.aio.Channel:
    """A channel to `address`, HOST:PORT or unix:PATH, through no proxy. ChannelError."""
    options = [*options, NO_PROXY]
    if tls is None or address.startswith("unix:"):
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, tls.credentials(), options=[*options, *expecting(tls.name)])


def expecting(name: str) -> Options:
    """The channel's authority: what the other end's certificate must name, where its address does not say it."""
    return [("grpc.default_authority", name)] if name else []
