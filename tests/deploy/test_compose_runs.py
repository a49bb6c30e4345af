"""The processes of deploy/compose.yaml, started as plain processes with what the file gives each, and answering.

Names of containers are this machine's loopback address here, ports any free ones, volumes folders.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import yaml

from kvferry.daemon.cli.stack import Process, Stack
from kvferry.workers.smollm import converted_model

COMPOSE = Path(__file__).resolve().parents[2] / "deploy" / "compose.yaml"
OURS = ("prefill", "prefill-worker", "decode", "decode-worker", "front")  # each after those that it depends on
LISTENS = re.compile(r"0\.0\.0\.0:(\d+)")
START_SECONDS = 120.0

pytestmark = pytest.mark.nightly  # a model on CPUs


class Running(NamedTuple):
    url: str
    metrics: dict[str, str]  # address by role
    stack: Stack
    processes: dict[str, Process]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Translation:
    """What stands in the file, as it is on this machine."""

    def __init__(self, services: dict[str, Any], folder: Path) -> None:
        self._folder = folder
        self._ports: dict[tuple[str, str], int] = {}
        for name in OURS:
            for _, text in self._texts(services[name]):
                for port in LISTENS.findall(text):
                    self._ports.setdefault((name, port), free_port())

    @staticmethod
    def _texts(service: dict[str, Any]) -> list[tuple[str, str]]:
        return [*service.get("environment", {}).items(), *(("", word) for word in service["command"])]

    def address(self, name: str, port: str) -> str:
        return f"127.0.0.1:{self._ports[name, port]}"

    def of(self, name: str, service: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
        """(words, environment) of a service's process."""
        folders = {where: self._folder / volume for volume, where in (v.split(":") for v in service.get("volumes", []))}
        for folder in folders.values():
            folder.mkdir(exist_ok=True)

        def translated(text: str) -> str:
            text = LISTENS.sub(lambda found: self.address(name, found[1]), text)
            text = re.sub(rf"\b({'|'.join(OURS)}):(\d+)", lambda found: self.address(found[1], found[2]), text)
            for where, folder in folders.items():
                text = text.replace(where, str(folder))
            return text.replace("/opt/models/smollm2", str(converted_model()))

        told = [(key, translated(text)) for key, text in self._texts(service)]
        return [text for key, text in told if not key], {key: text for key, text in told if key}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    translation = Translation(services, tmp_path_factory.mktemp("compose"))
    with Stack() as stack:
        processes: dict[str, Process] = {}
        for name in OURS:
            assert set(services[name].get("depends_on", ())) <= set(processes), f"{name} starts before what it needs"
            words, environment = translation.of(name, services[name])
            processes[name] = stack.start(name, words, environment=environment)
            stack.ready(processes[name], START_SECONDS)
        metrics = {role: translation.address(role, port) for role, port in (("prefill", "9471"), ("decode", "9470"))}
        yield Running(f"http://{translation.address('front', '8000')}", metrics, stack, processes)


def until(come: Callable[[], bool], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not come():
        assert time.monotonic() < end, f"{what} did not come in {seconds} s"
        time.sleep(0.1)


def ask(client: openai.OpenAI, *words: str) -> openai.types.chat.ChatCompletion:
    messages: Any = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(words)]
    return client.chat.completions.create(model="smollm2", messages=messages, max_tokens=24, temperature=0)


@pytest.mark.timeout(400)
def test_an_openai_client_is_answered(running: Running) -> None:
    """By a real model; the second turn is met in the decode daemon's cache."""
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    question = "In one sentence: what is a ferry, and what does it carry from one side of a river to the other?"
    first = ask(client, question).choices[0].message.content
    assert first and re.search("[a-z]{4,} [a-z]+", first), first
    second = ask(client, question, first, "And a canoe?")
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= 16
    assert httpx.get(f"{running.url}/health").status_code == 200
    told = httpx.get(f"http://{running.metrics['decode']}/metrics").text
    assert 'kvferry_requests_ended_total{outcome="finished",role="decode"} 2.0' in told
    assert httpx.get(f"http://{running.metrics['prefill']}/metrics").status_code == 200


@pytest.mark.timeout(400)
def test_it_answers_while_the_prefill_node_is_away(running: Running) -> None:
    client = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0)
    for name in ("prefill-worker", "prefill"):
        running.stack.stop(running.processes[name])
    assert ask(client, "Name a river in Africa, please, and one in Asia.").choices[0].message.content
    until(lambda: httpx.get(f"{running.url}/kvferry/stats").json()["decode_alone"] >= 1, "decode alone")
    assert httpx.get(f"{running.url}/health").status_code == 200
