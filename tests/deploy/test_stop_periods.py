"""Nobody kills a daemon before it has ended by itself: stop periods of deploy/ hold all that its end may take."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.daemon.backstop import LATER_SECONDS
from kvferry.daemon.cli import serve
from kvferry.daemon.config import sources as config_sources
from kvferry.daemon.server import END_SECONDS
from kvferry.workers import main as worker_main

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
KUBERNETES = DEPLOY / "kubernetes"
PODS = ("daemonset/daemonset", "sidecar/decode", "sidecar/prefill")


def daemon_takes(words: list[str], environ: dict[str, str]) -> float:
    assert words[0] == "serve"
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    told = {name: value for name, value in environ.items() if name in ("KVFERRY_ROLE", "KVFERRY_GRACE_SECONDS")}
    config = config_sources.load(parser.parse_args(words[1:]), told).config
    return config.grace_seconds + END_SECONDS + LATER_SECONDS


def worker_takes(words: list[str]) -> float:
    assert words[0] == "worker"
    parser = argparse.ArgumentParser()
    worker_main.add_arguments(parser)
    return float(parser.parse_args(words[1:]).grace)


@pytest.mark.parametrize("service", ["prefill", "decode"])
def test_compose_waits_for_daemons_and_workers(service: str) -> None:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    daemon, worker = services[service], services[f"{service}-worker"]
    assert seconds(daemon["stop_grace_period"]) > daemon_takes(daemon["command"], daemon["environment"])
    assert seconds(worker["stop_grace_period"]) > worker_takes(worker["command"])


def seconds(period: str) -> float:
    assert period.endswith("s")
    return float(period[:-1])


@pytest.mark.parametrize("pod", PODS)
def test_pods_wait_for_their_engine_and_then_for_their_daemon(pod: str) -> None:
    spec: dict[str, Any] = yaml.safe_load((KUBERNETES / "base" / f"{pod}.yaml").read_text())["spec"]["template"]["spec"]
    takes = 0.0
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        if container["name"] == "kvferry":
            environ = {each["name"]: each["value"] for each in container["env"] if "value" in each}
            takes += daemon_takes(container["args"], environ)
        else:
            takes += worker_takes(container["args"]) + container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert takes >= END_SECONDS
    assert spec["terminationGracePeriodSeconds"] > takes


def test_no_overlay_says_another_period() -> None:
    """So that those of the base hold, with the settings that these are summed with."""
    for folder in ("overlays", "components"):
        for path in (KUBERNETES / folder).rglob("*.yaml"):
            text = path.read_text()
            assert "terminationGracePeriodSeconds" not in text and "KVFERRY_GRACE_SECONDS" not in text, path
