"""Two containers' root file systems, prefill and decode, in two network namespaces joined by a cable, and the synthetic
multi-turn load between them: `make image image-test`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOTFS = Path(os.environ.get("KVFERRY_TEST_ROOTFS", ROOT / "build" / "images" / "rootfs-cpu"))
RUN, ENTER = ROOT / "deploy" / "image" / "run-rootfs.sh", ROOT / "deploy" / "image" / "enter-rootfs.sh"
ADDRESS = {"prefill": "198.18.0.1", "decode": "198.18.0.2"}  # of the range for tests of network devices
PORT = {"prefill": 7071, "decode": 7070}
READY_SECONDS = 90.0

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(os.geteuid() != 0, reason="network and mount namespaces need root"),
    pytest.mark.skipif(shutil.which("ip") is None, reason="ip is not here: apt-get install iproute2"),
    pytest.mark.skipif(not (ROOTFS / "opt/kvferry").is_dir(), reason="there is no image: make image (with buildah)"),
]


def run(*command: str | Path) -> str:
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


class Container:
    """One root file system in namespaces of its own; its first process is the daemon."""

    def __init__(self, role: str, namespace: str, folder: Path, stack: ExitStack) -> None:
        self.role, self.namespace, self.folder, self.stack = role, namespace, folder, stack
        self.pid = 0
        self.logs: list[Path] = []

    def start(self, *words: str) -> None:
        inside = ["unshare", "--mount", "--pid", "--fork", "--kill-child", str(RUN), str(ROOTFS)]
        outer = self._spawn("daemon", ["ip", "netns", "exec", self.namespace, *inside, "kvferry", *words])
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")  # ip has become unshare, which has forked
        until(lambda: children.read_text().split(), "the daemon's process")
        self.pid = int(children.read_text().split()[0])
        self.stack.callback(os.kill, self.pid, signal.SIGTERM)  # unshare itself passes no signal on

    def worker(self, *words: str) -> None:
        self._spawn("worker", [*self._entered(), "kvferry", "worker", self.role, *words])

    def run(self, *words: str) -> str:
        return run(*self._entered(), *words)

    def _entered(self) -> list[str]:
        return ["nsenter", "-t", str(self.pid), "-m", "-n", "-p", str(ENTER), str(ROOTFS)]

    def _spawn(self, name: str, command: Sequence[str]) -> subprocess.Popen[str]:
        path = self.folder / f"{self.role}-{name}.log"
        self.logs.append(path)
        with path.open("w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
        self.stack.callback(process.wait, 30)
        if name != "daemon":
            self.stack.callback(process.terminate)
        return process

    def says(self, name: str, words: str) -> bool:
        return words in (self.folder / f"{self.role}-{name}.log").read_text()


def until(come: object, what: str, seconds: float = READY_SECONDS) -> None:
    assert callable(come)
    deadline = time.monotonic() + seconds
    while not come():
        assert time.monotonic() < deadline, f"{what} did not come within {seconds} s"
        time.sleep(0.1)


@pytest.fixture
def containers(tmp_path: Path) -> Iterator[dict[str, Container]]:
    names = {role: f"kvf-{role[0]}-{os.getpid()}" for role in ADDRESS}
    with ExitStack() as stack:
        for name in names.values():
            run("ip", "netns", "add", name)
            stack.callback(run, "ip", "netns", "del", name)
            run("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
        cable = [f"kvf{os.getpid()}{role[0]}" for role in names]
        run("ip", "link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
        for (role, name), end in zip(names.items(), cable, strict=True):
            run("ip", "link", "set", end, "netns", name, "name", "eth0")
            run("ip", "netns", "exec", name, "ip", "addr", "add", f"{ADDRESS[role]}/30", "dev", "eth0")
            run("ip", "netns", "exec", name, "ip", "link", "set", "eth0", "up")
        made = {role: Container(role, name, tmp_path, stack) for role, name in names.items()}
        yield made
    for container in made.values():
        for path in container.logs:
            print(f"== {path.name}\n{path.read_text()[-3000:]}", file=sys.stderr)


@pytest.mark.timeout(400)
def test_two_containers_serve_a_multi_turn_load(containers: dict[str, Container], tmp_path: Path) -> None:
    for role, container in containers.items():
        words = ["serve", "--role", role, "--listen", f"{ADDRESS[role]}:{PORT[role]}", "--insecure"]
        words += ["--metrics", f"{ADDRESS[role]}:9470", "--pool-bytes", "64MiB", "--page-size", "16"]
        words += ["--slots", "4", "--slot-bytes", "1MiB"]
        if role == "decode":
            words += ["--peer", f"prefill={ADDRESS['prefill']}:{PORT['prefill']}"]
        container.start(*words)
    for role, container in containers.items():
        until(lambda c=container: c.says("daemon", "ready: daemon"), f"{role} daemon")
        assert container.run("kvferry", "health").strip() == "SERVING"  # the probe, in the container
        socket = f"/run/kvferry/kvferry-{role}.sock"
        container.worker("--socket", socket, "--listen", f"{ADDRESS[role]}:8101", "--insecure", "--synthetic")
    for role, container in containers.items():
        until(lambda c=container: c.says("worker", "ready: "), f"{role} worker")
    decode = containers["decode"]
    outside = ["ip", "netns", "exec", decode.namespace, sys.executable, "-m", "kvferry"]
    front = [*outside, "front", "--listen", "127.0.0.1:8000", "--prefill", f"{ADDRESS['prefill']}:8101"]
    decode._spawn("front", [*front, "--decode", f"{ADDRESS['decode']}:8101"])
    until(lambda: decode.says("front", "ready: "), "front end")
    load = ["--url", "http://127.0.0.1:8000", "--conversations", "4", "--turns", "3", "--max-tokens", "16"]
    load += ["--api", "completions-tokens", "--vocabulary", "32000", "--user-words", "100", "--format", "json"]
    report = json.loads(run(*outside, "loadgen", *load, "--stats", f"{ADDRESS['decode']}:7070"))
    print(json.dumps(report)[:2000])
    told = json.loads(decode.run("kvferry", "stats", f"{ADDRESS['decode']}:7070", "--format", "json"))
    side = told["sides"][0]
    assert int(side["requests"]["finished"]) == 12
    assert int(side["requests"]["failed"]) == 0
    assert int(side["requests"]["hit_tokens"]) > 0
    assert int(side["transfers"]["delta_pages"]) > 0
    assert side["peers"][0]["state"] == "up"
    scrape = [
        "import urllib.request as u",
        f"print(u.urlopen('http://{ADDRESS['decode']}:9470/metrics').read().decode())",
    ]
    text = run("ip", "netns", "exec", decode.namespace, sys.executable, "-c", "; ".join(scrape))
    finished = 'kvferry_requests_ended_total{outcome="finished",role="decode"} 12.0'
    assert finished in text


def test_nothing_in_the_image_can_be_written() -> None:
    script = "import os, sys; open('/opt/kvferry/x', 'w')"
    command = ["unshare", "--mount", "--pid", "--fork", str(RUN), str(ROOTFS), "python3", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert "Read-only file system" in done.stderr
    whoami = "import os; print(os.getuid(), os.access(os.environ['HOME'], os.R_OK | os.X_OK))"
    command[-1] = whoami
    assert run(*command) == "65532 True\n"
