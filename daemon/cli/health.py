"""`kvferry health`: whether a daemon takes work, for probes: no shell, no curl, one gRPC call of grpc.health.v1.

Exit status 0: yes. 1: it answers, but takes no new work (it drains, stands still, or can serve no worker), or with
--engine has no engine; the reason stands behind the status. 2: nobody answers, or a flag is wrong.
"""

from __future__ import annotations

import argparse
import sys

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from kvferry.channels import ChannelError, add_tls_arguments, open_channel, tls_of
from kvferry.daemon.cli.find_daemon import ADDRESS_HELP, default_address
from kvferry.proto.health import ENGINE_SERVICE, HEALTH_WHY

STATUS = health_pb2.HealthCheckResponse.ServingStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "address",
        nargs="?",
        help=f"HOST:PORT or unix:PATH (default: {ADDRESS_HELP})",
    )
    parser.add_argument("--live", action="store_true", help="any answer will do, also of one that drains")
    parser.add_argument("--engine", action="store_true", help="also, whether each of its roles has an engine")
    add_tls_arguments(parser)
    parser.add_argument("--timeout", type=float, default=3.0, metavar="SECONDS", help="default: %(default)s")


def run(args: argparse.Namespace) -> int:
    if not 0.05 <= args.timeout <= 60:
        print(f"kvferry health: --timeout is {args.timeout}; it must be 0.05 to 60", file=sys.stderr)
        return 2
    try:
        address = args.address or default_address()
        opened = open_channel(address, tls_of(args))
    except ChannelError as error:
        print(f"kvferry health: {error}", file=sys.stderr)
        return 2
    with opened as channel:
        try:
            asked = health_pb2.HealthCheckRequest(service=ENGINE_SERVICE if args.engine else "")
            reply, call = HealthStub(channel).Check.with_call(asked, timeout=args.timeout)
        except grpc.RpcError as error:
            print(f"kvferry health: {address}: {error.code().name}: {error.details()}", file=sys.stderr)
            return 2
    why = [value.decode(errors="replace") for key, value in call.trailing_metadata() or () if key == HEALTH_WHY]
    print(": ".join([STATUS.Name(reply.status), *why]))
    return 0 if args.live or reply.status == STATUS.SERVING else 1
