"""`kvferry completion`: a script by which a shell completes commands, flags and their choices."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="bash: put it where bash-completion looks; zsh: a file _kvferry")


def run(args: argparse.Namespace) -> int:
    import shtab

    from kvferry.daemon.cli.main import COMMANDS, parser_of

    parser, _ = parser_of(tuple(COMMANDS), passed_over=(ModuleNotFoundError,))  # extras that are not installed
    print(shtab.complete(parser, args.shell))
    return 0
