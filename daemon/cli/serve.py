"""`kvferry serve`: settings, and the daemon's run."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys

from kvferry import tracing
from kvferry.daemon.config import sources as config_sources
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.values import ConfigError
from kvferry.logs import LOG_FORMAT
from kvferry.pauses import short_collections

add_arguments = config_sources.add_arguments


def config_of(args: argparse.Namespace) -> DaemonConfig:
    """ConfigError where a setting cannot be."""
    return config_sources.load(args).config


def run(args: argparse.Namespace) -> int:
    try:
        config = config_of(args)
        logging.basicConfig(level=config.log_level.upper(), format=LOG_FORMAT)
        tracing.configure("kvferry-daemon", config.otel, **{"service.instance.id": config.name})
        asyncio.run(_serve(config))
    except (ConfigError, tracing.TracingError, OSError) as error:
        print(f"kvferry serve: {error}", file=sys.stderr)
        return 2
    finally:
        tracing.shutdown()
    return 0


async def _serve(config: DaemonConfig) -> None:
    # gRPC's core and NIXL are imported only here, so that a wrong flag is answered at once.
    from kvferry._core import gpu_spare_stacks
    from kvferry.daemon.server import Daemon

    gpu_spare_stacks()

    daemon = Daemon(config, leave=os._exit)
    try:
        await daemon.start()
    except BaseException:
        daemon.discard()
        raise
    with short_collections():
        print(f"ready: daemon {daemon.address}", flush=True)
        await daemon.run_until_stopped()
