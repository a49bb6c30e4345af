"""The `kvferry` command: subcommands live in modules of their own, imported when they are named."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import kvferry

# Module, or module:attribute, that has add_arguments and run.
COMMANDS = {
    "serve": ("kvferry.daemon.cli.serve", "run a daemon: decode, prefill or both"),
    "worker": ("kvferry.workers.main", "run a reference worker around a transformer"),
    "front": ("kvferry.front.main", "run the OpenAI-compatible front end"),
    "loadgen": ("kvferry.loadgen.main", "drive a front end with multi-turn conversations"),
    "size": ("kvferry.daemon.cli.size", "pool, host tier, slots and memory for a model and its chats"),
    "config": ("kvferry.daemon.cli.config", "show the settings of a daemon and their origin, or their schema"),
    "doctor": ("kvferry.daemon.cli.doctor", "whether this machine is fit for a daemon"),
    "health": ("kvferry.daemon.cli.health", "whether a daemon takes work, for probes"),
    "stats": ("kvferry.daemon.cli.stats", "show a daemon's cache statistics"),
    "top": ("kvferry.daemon.cli.top", "several daemons at a glance, live"),
    "flush": ("kvferry.daemon.cli.admin:flush", "free the cached pages of a daemon that nothing holds"),
    "pin": ("kvferry.daemon.cli.admin:pin", "hold a prompt in a daemon's cache for a time"),
    "unpin": ("kvferry.daemon.cli.admin:unpin", "end a pin, or all"),
    "dump": ("kvferry.daemon.cli.admin:dump", "show what a daemon's cache holds, node by node"),
    "demo": ("kvferry.daemon.cli.demo", "the whole system on this machine, reuse off and on"),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="kvferry", description=kvferry.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    chosen: argparse.ArgumentParser | None = None
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (where, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if words[:1] == [name]:
            chosen = command
            _load(where).add_arguments(command)
    args, unknown = parser.parse_known_args(words)
    if unknown:
        from kvferry.daemon.config.values import nearest  # not at the top: `kvferry --help` begins without it

        usage = chosen.format_usage() if chosen is not None else ""
        flag = unknown[0].partition("=")[0]
        parser.error(f"{args.command}: {flag!r} is no flag of it{nearest(flag, re.findall('--[a-z][a-z-]*', usage))}")
    try:
        status = int(_load(COMMANDS[args.command][0]).run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads the output has enough; what is left must not fail again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


class _Version(argparse.Action):
    """argparse's own wants the version before anybody asks for it, and to look it up takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"kvferry {kvferry.__version__}")
        parser.exit()


def _load(where: str) -> Any:
    module, _, attribute = where.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded
