"""SGLang's servers and kvferry's daemons on one machine with GPUs, for the scripts beside it.

ROOT  the folder with SGLang unpacked (site, model, jit, triton)     PACK  serve_sglang.sh and bench_sglang.py
OUT_DIR  what is to be kept: logs
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.proto import cache_pb2

ROOT = Path(os.environ.get("ROOT", Path.home() / "sgl"))
PACK = Path(os.environ.get("PACK", "build/sglang-pack"))
OUT = Path(os.environ.get("OUT_DIR", "build/sglang-out"))
PREFILL_PORT, DECODE_PORT = 8100, 8200
READY = "fired up and ready"
START_SECONDS = 240.0
STOP_SECONDS = 20.0
RADIX = ("--disaggregation-decode-enable-radix-cache",)


class DidNotStart(RuntimeError):
    """A server ended, or was not ready in time; the message has the end of its log."""


@dataclass(frozen=True)
class System:
    """One way to serve: which backend, and the decode engine's flags."""

    name: str
    backend: str  # "kvferry", "nixl", or "" for one server alone
    flags: tuple[str, ...] = ()  # of decode
    host_bytes: str = "0"  # of kvferry's decode daemon
    environment: Mapping[str, str] = field(default_factory=dict)


class Machine:
    """What runs. A context: what it started is ended with it."""

    def __init__(self, page: int = 64) -> None:
        self.page = page
        self.stack: Stack | None = None
        self.servers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop(*self.servers)
        self.stop_daemons()

    # -- kvferry

    def start_daemons(self, host_bytes: str) -> None:
        self.stack = Stack()
        common = ["--pool", "engine", "--page-size", str(self.page), "--metrics", ""]
        for role, device in (("prefill", "cuda:0"), ("decode", decode_device())):
            words = [
                "serve",
                "--role",
                role,
                "--name",
                role,
                "--socket",
                self.socket(role),
                "--device",
                device,
                *common,
            ]
            if role == "prefill":
                words += ["--listen", "127.0.0.1:7071"]
            else:
                words += ["--listen", "127.0.0.1:7070", "--peer", "prefill=127.0.0.1:7071", "--host-bytes", host_bytes]
                words += ["--ucx-ports", "21100-21163"]
            self.stack.ready(self.stack.start(f"{role}-daemon", words))

    def stop_daemons(self) -> None:
        if self.stack is not None:
            for process in self.stack.processes:
                (OUT / f"{process.name}.log").write_text(process.tail(1 << 20))
            self.stack.close()
            self.stack = None

    def socket(self, role: str) -> str:
        assert self.stack is not None
        return str(Path(self.stack.folder) / f"{role}.sock")

    def stats(self, role: str) -> cache_pb2.SideStats:
        with grpc.insecure_channel(f"unix:{self.socket(role)}") as channel:
            return fetch(channel).sides[0]

    def daemon_tails(self, size: int = 4000) -> str:
        if self.stack is None:
            return ""
        return "\n".join(f"-- {process.name}\n{process.tail(size)}" for process in self.stack.processes)

    # -- SGLang

    def start(
        self, name: str, role: str, system: System, *, gpu: int, port: int, tokens: int, flags: Sequence[str] = ()
    ) -> None:
        """Starts a server: `role` is prefill, decode or null."""
        words = ["bash", str(PACK / "serve_sglang.sh"), name, str(gpu), str(port), role, *flags]
        environment = {**os.environ, "TOKENS": str(tokens), "PAGE": str(self.page), **system.environment}
        environment["SGLANG_PLUGINS"] = "kvferry"
        if system.backend == "kvferry" and role != "null":
            words += ["--disaggregation-transfer-backend", "kvferry"]
            settings = {"socket": self.socket(role), "revision": "bench"}
            environment["SGLANG_KVFERRY"] = json.dumps(settings)
        self.servers[name] = subprocess.Popen(words, env=environment, cwd=OUT)

    def wait(self, *names: str) -> None:
        """Until they are ready. DidNotStart."""
        end = time.monotonic() + START_SECONDS
        for name in names:
            while READY not in self.log(name):
                if not self._lives(name) or time.monotonic() > end:
                    tail = [line[:400] for line in self.log(name).splitlines() if line.strip()][-60:]
                    raise DidNotStart("\n".join([f"{name} is not ready:", *tail, self.daemon_tails()]))
                time.sleep(0.3)

    def log(self, name: str) -> str:
        path = ROOT / "log" / name
        return path.read_text(errors="replace") if path.exists() else ""

    def errors(self, name: str, most: int = 15) -> list[str]:
        """The lines of its log that an operator should read."""
        words = ("Error", "ERROR", "Traceback", "kvferry", "WARNING", "failed")
        found = [line[:300] for line in self.log(name).splitlines() if any(word in line for word in words)]
        return found[-most:]

    def stop(self, *names: str) -> None:
        for name in names:
            if self._lives(name):
                os.kill(self._pid(name), signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        for name in names:
            while self._lives(name) and time.monotonic() < end:
                time.sleep(0.2)
            if pid := self._pid(name):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            self.servers.pop(name).wait()
            if (log := ROOT / "log" / name).exists():
                shutil.copy(log, OUT / f"{name}.log")
            (ROOT / "log" / f"{name}.pid").unlink(missing_ok=True)
            (ROOT / "log" / name).unlink(missing_ok=True)

    def _pid(self, name: str) -> int:
        path = ROOT / "log" / f"{name}.pid"
        return int(path.read_text()) if path.exists() else 0

    def _lives(self, name: str) -> bool:
        if not (pid := self._pid(name)):
            return self.servers[name].poll() is None
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True


def gpus() -> int:
    told = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return len([line for line in told.splitlines() if line.startswith("GPU ")])


def decode_gpu() -> int:
    return 1 if gpus() > 1 else 0


def decode_device() -> str:
    return f"cuda:{decode_gpu()}"


def start_pair(
    machine: Machine, system: System, *, prefill_tokens: int, decode_tokens: int, flags: Sequence[str] = ()
) -> None:
    """A prefill and a decode server of one system. DidNotStart."""
    if system.backend == "kvferry":
        machine.start_daemons(system.host_bytes)
    machine.start("p", "prefill", system, gpu=0, port=PREFILL_PORT, tokens=prefill_tokens, flags=flags)
    both = (*flags, *system.flags)
    machine.start("d", "decode", system, gpu=decode_gpu(), port=DECODE_PORT, tokens=decode_tokens, flags=both)
    machine.wait("p", "d")


def stop_pair(machine: Machine) -> None:
    machine.stop("p", "d")
    machine.stop_daemons()
