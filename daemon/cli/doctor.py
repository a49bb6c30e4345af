"""`kvferry doctor`: whether this machine is fit for a daemon with these settings. Takes the flags of `kvferry serve`.

Exit status 1 where something is bad, 2 where a setting cannot be.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys

from rich.console import Console
from rich.text import Text

from kvferry.daemon.config import sources as config_sources
from kvferry.daemon.config.values import ConfigError

STYLES = {"ok": "green", "note": "yellow", "bad": "bold red"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text")
    config_sources.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from kvferry.daemon.cli.doctor_checks import CHECKS
    from kvferry.daemon.cli.findings import BAD, Finding

    try:
        config = config_sources.load(args, otherwise={"role": "decode"}).config
    except ConfigError as error:
        print(f"kvferry doctor: {error}", file=sys.stderr)
        return 2
    console = Console(soft_wrap=True)
    findings: list[Finding] = []
    for check in CHECKS:
        for finding in check(config):
            findings.append(finding)
            if args.format == "text":
                text = Text(f"{finding.level:<5}", STYLES[finding.level]).append(
                    f"{finding.what}: {finding.found}", "none"
                )
                console.print(text.append(f" -> {finding.remedy}", "cyan") if finding.remedy else text)
    if args.format == "json":
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    return 1 if any(finding.level == BAD for finding in findings) else 0
