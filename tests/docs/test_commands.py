"""Every command in a block marked `console` of a page runs, against a real system whose addresses stand in for
the default ones. `console nightly` runs with the long tests; `console not run: WHY` is listed as skipped.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.cli.system import SystemSpec, start_system

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))]
COMMAND_SECONDS = 60.0
NIGHTLY_SECONDS = 1200.0


@dataclass(frozen=True)
class Block:
    where: str
    info: str  # behind `console`
    commands: tuple[str, ...]


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for found in re.finditer(r"^```console(.*)\n((?:.*\n)*?)```$", page.read_text(), re.MULTILINE):
            line = page.read_text()[: found.start()].count("\n") + 1
            text = re.sub(r"\\\n\s*", "", found[2])
            assert all(row.startswith("$ ") for row in text.splitlines()), f"{page}:{line}: a line that is no command"
            commands = tuple(row.removeprefix("$ ") for row in text.splitlines())
            yield Block(f"{page.relative_to(ROOT)}:{line}", found[1].strip(), commands)


BLOCKS = list(blocks())
RUN = [block for block in BLOCKS if not block.info]
LONG = [block for block in BLOCKS if block.info == "nightly"]
LISTED = [block for block in BLOCKS if block.info not in ("", "nightly")]


def of(block: Block) -> str:
    return block.where


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    """What the default addresses and paths stand for here."""
    with Stack() as stack:
        spec = SystemSpec(page_size=16, decode_pool_bytes=64 << 20, prefill_pool_bytes=64 << 20)  # README's page size
        system = start_system(stack, spec)
        decode, prefill = system.decodes[0], system.prefills[0]
        found = {
            "127.0.0.1:7070": decode.daemon_address,
            "127.0.0.1:7071": prefill.daemon_address,
            "127.0.0.1:8000": system.url.removeprefix("http://"),
            "/tmp/kvferry/d0.sock": decode.socket,
            "/tmp/kvferry/p0.sock": prefill.socket,
        }
        for replica, default in ((decode, "127.0.0.1:9470"), (prefill, "127.0.0.1:9471")):
            with grpc.insecure_channel(replica.daemon_address, [("grpc.enable_http_proxy", 0)]) as channel:
                found[default] = fetch(channel).metrics
        yield found


def run(command: str, folder: Path, seconds: float) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    environment["no_proxy"] = "127.0.0.1"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, f"$ {command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("block", RUN, ids=of)
def test_commands_run(block: Block, addresses: dict[str, str], tmp_path: Path) -> None:
    for command in block.commands:
        for default, actual in addresses.items():
            command = command.replace(default, actual)
        run(command, tmp_path, COMMAND_SECONDS)


@pytest.mark.nightly
@pytest.mark.timeout(NIGHTLY_SECONDS + 60)
@pytest.mark.parametrize("block", LONG, ids=of)
def test_long_commands_run(block: Block) -> None:
    for command in block.commands:
        run(command, ROOT, NIGHTLY_SECONDS)


@pytest.mark.parametrize("block", LISTED, ids=of)
def test_what_is_not_run_says_why(block: Block) -> None:
    if block.info == "itself":
        assert block.commands == ("make test",)  # which runs this
        return
    assert re.fullmatch(r"not run: .+", block.info), block
    pytest.skip(f"{block.where} {block.info}")


def test_pages_have_commands() -> None:
    assert len(RUN) >= 5
    assert LONG
