"""The `kvferry` command: each subcommand lives in a module of its own, imported when it is named."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import kvferry

COMMANDS = {
    "serve": ("kvferry.daemon.serve", "run a daemon: decode, prefill or both"),
    "worker": ("kvferry.workers.main", "run a reference worker around a transformer"),
    "front": ("kvferry.workers.front_main", "run the OpenAI-compatible front end"),
    "loadgen": ("kvferry.loadgen.main", "drive a front end with multi-turn conversations"),
    "stats": ("kvferry.daemon.stats_main", "show a daemon's cache statistics"),
    "demo": ("kvferry.daemon.demo", "the whole system on this machine, reuse off and on"),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="kvferry", description=kvferry.__doc__)
    parser.add_argument("--version", action="version", version=f"kvferry {kvferry.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if words[:1] == [name]:
            importlib.import_module(module).add_arguments(command)
    args = parser.parse_args(words)
    run = importlib.import_module(COMMANDS[args.command][0]).run
    return int(run(args))
