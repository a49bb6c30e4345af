"""What docs/move-over-from-nixlconnector.md says must change: few lines, of settings that kvferry takes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from kvferry.connectors.params import answer, decode_half, prefill_half
from kvferry.connectors.settings import Settings
from kvferry.daemon.cli.main import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "move-over-from-nixlconnector.md"
MOST_LINES = 6
FROM_A_PROXY = {  # as proxies that know NixlConnector alone ask prefill
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def lines(sign: str) -> list[str]:
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    return [line[1:] for line in diff.splitlines() if line.startswith(sign)]


def test_at_most_six_lines_change() -> None:
    assert 0 < len(lines("-")) <= len(lines("+")) <= MOST_LINES
    assert not [line for line in [*lines("+"), *lines("-")] if "proxy" in line]
    assert [line for line in lines(" ") if "proxy" in line]


def test_the_new_settings_are_taken() -> None:
    found = [json.loads(text) for line in lines("+") for text in re.findall(r"--kv-transfer-config '(.*)'", line)]
    assert [each["kv_role"] for each in found] == ["kv_producer", "kv_consumer"]
    for each in found:
        assert Settings.of(each["kv_connector_extra_config"]).pool == "engine"
        assert each["kv_load_failure_policy"] == "recompute"


def test_the_new_daemons_flags_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    found = [shlex.split(line)[2:] for line in lines("+") if line.startswith("kvferry serve")]
    assert len(found) == 2
    for words in found:
        assert main(["config", "show", *words]) == 0, capsys.readouterr().err


def test_a_proxy_for_nixlconnector_hands_on_what_decode_takes() -> None:
    asked = prefill_half(FROM_A_PROXY)
    assert asked is not None and decode_half(FROM_A_PROXY, "") is None
    told = json.loads(json.dumps(answer(asked, "prefill", 7)))  # by way of the proxy
    half = decode_half(told, "")
    assert half is not None and half.name == asked.name and half.prefill == "prefill"
    assert prefill_half(told) is None
    with pytest.raises(ValueError, match="kvferry_prefill"):
        decode_half({**told, "kvferry_prefill": ""}, "")
