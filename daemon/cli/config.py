"""`kvferry config show` and `schema`: what `kvferry serve` would run with, where each value comes from, and what it may
be.
"""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.table import Table

from kvferry.daemon.config import sources as config_sources
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.sources import Loaded, shown
from kvferry.daemon.config.values import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="show|schema")
    show = commands.add_parser(
        "show",
        allow_abbrev=False,
        help="each setting of `kvferry serve` with these flags, variables and file, and where it comes from",
    )
    config_sources.add_arguments(show)
    show.add_argument("--format", choices=("table", "yaml", "json"), default="table", help="yaml: a file for --config")
    commands.add_parser("schema", allow_abbrev=False, help="the JSON schema of the YAML file")


def run(args: argparse.Namespace) -> int:
    if args.action == "schema":
        print(json.dumps(schema(), indent=2))
        return 0
    try:
        loaded = config_sources.load(args)
    except ConfigError as error:
        print(f"kvferry config show: {error}", file=sys.stderr)
        return 2
    {"table": _table, "yaml": _yaml, "json": _json}[args.format](loaded)
    return 0


def schema() -> dict[str, object]:
    """The JSON schema of the YAML file, where nothing is needed: the rest may come from variables and flags."""
    found: dict[str, object] = DaemonConfig.model_json_schema()
    found.pop("required", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **found}


def _table(loaded: Loaded) -> None:
    table = Table()
    for column in ("setting", "value", "from"):
        table.add_column(column, overflow="fold")
    for name in DaemonConfig.model_fields:
        table.add_row(name, shown(name, getattr(loaded.config, name)) or "-", loaded.origins.get(name, "default"))
    Console(markup=False).print(table)


def _yaml(loaded: Loaded) -> None:
    for name in DaemonConfig.model_fields:
        # JSON's strings are YAML's, too, and every setting takes a string.
        value = shown(name, getattr(loaded.config, name))
        print(f"{name}: {json.dumps(value)}  # {loaded.origins.get(name, 'default')}")


def _json(loaded: Loaded) -> None:
    found = {
        name: {"value": shown(name, getattr(loaded.config, name)), "from": loaded.origins.get(name, "default")}
        for name in DaemonConfig.model_fields
    }
    print(json.dumps(found))
