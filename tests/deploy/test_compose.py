"""deploy/compose.yaml: its schema, what its containers may do, and that each daemon's settings are settings."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml

from kvferry import listening
from kvferry.daemon.cli import serve
from kvferry.daemon.config import sources as config_sources
from kvferry.front import main as front_main
from kvferry.workers import main as worker_main

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
COMPOSE = DEPLOY / "compose.yaml"
OURS = ("prefill", "prefill-worker", "decode", "decode-worker", "front")


def parsed(text: str) -> Any:
    """By an independent reader of the specification; merge keys are resolved before, since it knows one level only, and
    variables have their defaults."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    return compose_spec.PyCompose.from_yaml(yaml.safe_dump(yaml.safe_load(text)))


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    compose = parsed(COMPOSE.read_text())
    compose.validate()
    found: dict[str, Any] = compose.to_dict()["services"]
    return found


def test_the_schema_is_looked_at() -> None:
    for wrong in ("healthchek: {disable: true}", "ports: 5", "read_only: perhaps", "networks: [nowhere]"):
        with pytest.raises(Exception, match=r".+"):
            parsed(f"services:\n  a:\n    image: x\n    {wrong}\n").validate()


def test_a_front_end_nodes_monitoring_and_nothing_else(services: dict[str, Any]) -> None:
    assert set(services) == {*OURS, "prometheus", "grafana"}


def test_containers_may_do_nothing_special(services: dict[str, Any]) -> None:
    for name in OURS:
        service = services[name]
        assert service["read_only"] is True
        assert str(service["user"]) == "65532:65532"
    for name, service in services.items():
        assert service["cap_drop"] == ["ALL"], name
        assert "privileged" not in service
        assert any("no-new-privileges" in str(option) for option in service["security_opt"])


def test_only_loopback_is_published_and_no_password_is_set() -> None:
    raw = yaml.safe_load(COMPOSE.read_text())
    for name, service in raw["services"].items():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), name
        for variable in service.get("environment", {}):
            assert "PASSWORD" not in variable
    grafana = raw["services"]["grafana"]["environment"]
    assert grafana["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert grafana["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert raw["networks"]["sessions"]["internal"] is True


def test_daemons_take_their_settings() -> None:
    raw = yaml.safe_load(COMPOSE.read_text())
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    targets = []
    for role in ("prefill", "decode"):
        service = raw["services"][role]
        config = config_sources.load(parser.parse_args(service["command"][1:]), service["environment"]).config
        assert config.role == role
        assert config.pool_bytes <= 1100 * 10**6  # shm_size
        targets.append(f"{role}:{config.metrics.rpartition(':')[2]}")
        for address in config.peers.values():
            assert address == "prefill:7071"
    prometheus = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    assert prometheus["scrape_configs"][0]["static_configs"][0]["targets"] == targets


def test_workers_take_their_words() -> None:
    raw = yaml.safe_load(COMPOSE.read_text())
    parser = argparse.ArgumentParser()
    worker_main.add_arguments(parser)
    for role in ("prefill", "decode"):
        word, *words = raw["services"][f"{role}-worker"]["command"]
        args = parser.parse_args(words)
        assert (word, args.role) == ("worker", role)
        assert not listening.problem(args, "it is of a container")


def test_the_front_end_takes_its_words_and_the_image_is_a_parameter() -> None:
    raw = yaml.safe_load(COMPOSE.read_text())
    parser = argparse.ArgumentParser()
    front_main.add_arguments(parser)
    word, *words = raw["services"]["front"]["command"]
    args = parser.parse_args(words)
    assert (word, args.prefill, args.decode) == ("front", ["prefill-worker:8101"], ["decode-worker:8101"])
    assert raw["services"]["front"]["ports"] == ["127.0.0.1:8000:8000"] and args.listen.port == 8000
    assert {raw["services"][name]["image"] for name in OURS} == {"${KVFERRY_IMAGE:-kvferry:demo}"}


def test_what_is_mounted_is_there() -> None:
    raw = yaml.safe_load(COMPOSE.read_text())
    bound = [volume.split(":")[0] for service in raw["services"].values() for volume in service.get("volumes", [])]
    files = [path for path in bound if path.startswith("./")]
    assert len(files) == 4
    for path in files:
        assert (DEPLOY / path).exists(), path
    provider = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/kvferry.yaml").read_text())
    mounts = raw["services"]["grafana"]["volumes"]
    assert f"./grafana/dashboards:{provider['providers'][0]['options']['path']}:ro" in mounts
