"""The `kvferry` command: subcommands live in modules of their own, imported when they are named."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import kvferry
from kvferry.proto.versions import PROTOCOL, PROTOCOL_MIN


class Subcommand(NamedTuple):
    """A subcommand: a module, or module:attribute, that has add_arguments and run."""

    where: str
    summary: str
    extra: str = ""  # of the package, that has what it imports


COMMANDS = {
    "serve": Subcommand("kvferry.daemon.cli.serve", "run a daemon: decode, prefill or both"),
    "worker": Subcommand("kvferry.workers.main", "run a reference worker around a transformer", "workers"),
    "front": Subcommand("kvferry.front.main", "run the OpenAI-compatible front end", "front"),
    "loadgen": Subcommand("kvferry.loadgen.main", "drive a front end with multi-turn conversations", "front"),
    "size": Subcommand("kvferry.daemon.cli.size", "pool, host tier, slots and memory for a model and its chats"),
    "config": Subcommand(
        "kvferry.daemon.cli.config", "show the settings of a daemon and their origin, or their schema"
    ),
    "doctor": Subcommand("kvferry.daemon.cli.doctor", "whether this machine is fit for a daemon"),
    "health": Subcommand("kvferry.daemon.cli.health", "whether a daemon takes work, for probes"),
    "stats": Subcommand("kvferry.daemon.cli.stats", "show a daemon's cache statistics"),
    "top": Subcommand("kvferry.daemon.cli.top", "several daemons at a glance, live"),
    "flush": Subcommand("kvferry.daemon.cli.admin:flush", "free the cached pages of a daemon that nothing holds"),
    "pin": Subcommand("kvferry.daemon.cli.admin:pin", "hold a prompt in a daemon's cache for a time"),
    "unpin": Subcommand("kvferry.daemon.cli.admin:unpin", "end a pin, or all"),
    "dump": Subcommand("kvferry.daemon.cli.admin:dump", "show what a daemon's cache holds, node by node"),
    "demo": Subcommand("kvferry.daemon.cli.demo", "the whole system on this machine, reuse off and on", "demo"),
    "completion": Subcommand("kvferry.daemon.cli.completion", "print what completes these commands in a shell"),
}


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except ModuleNotFoundError as error:
        command = COMMANDS.get(words[0]) if words else None
        missing = missing_package(error)
        if command is None or not command.extra or not missing:
            raise
        print(
            f"kvferry {words[0]}: needs the package {missing}: pip install 'kvferry[{command.extra}]'", file=sys.stderr
        )
        return 2


def missing_package(error: BaseException | None) -> str:
    """The package of others that an import failed for, also where who imports it says so in words of its own; empty:
    none."""
    while error is not None:
        name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
        if name not in ("", "kvferry"):
            return name
        error = error.__cause__
    return ""


def _run(words: list[str]) -> int:
    parser, chosen = parser_of(words[:1])
    args, unknown = parser.parse_known_args(words)
    if unknown:
        from kvferry.daemon.config.values import nearest  # not at the top: `kvferry --help` begins without it

        usage = chosen.format_usage() if chosen is not None else ""
        flag = unknown[0].partition("=")[0]
        parser.error(f"{args.command}: {flag!r} is no flag of it{nearest(flag, re.findall('--[a-z][a-z-]*', usage))}")
    try:
        status = int(_load(COMMANDS[args.command].where).run(args))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # who reads the output has enough; what is left must not fail again at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def parser_of(
    names: Sequence[str], passed_over: Sequence[type[Exception]] = ()
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser | None]:
    """The parser of all commands, where those of these names have their flags, and the parser of the last of them.
    One that cannot be loaded for such an error has none."""
    parser = argparse.ArgumentParser(prog="kvferry", description=kvferry.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action=_Version, nargs=0, help="show version and protocols, and exit")
    chosen: argparse.ArgumentParser | None = None
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (where, summary, _) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name in names:
            chosen = command
            try:
                _load(where).add_arguments(command)
            except tuple(passed_over):
                continue
    return parser, chosen


class _Version(argparse.Action):
    """argparse's own wants the version before anybody asks for it, and to look it up takes a while."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"kvferry {kvferry.__version__}, protocol {PROTOCOL}, oldest peer {PROTOCOL_MIN}")
        parser.exit()


def _load(where: str) -> Any:
    module, _, attribute = where.partition(":")
    loaded = importlib.import_module(module)
    return getattr(loaded, attribute) if attribute else loaded
