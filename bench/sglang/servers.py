"""SGLang's servers and kvferry's daemons on one machine with GPUs, for the scripts beside it.

ROOT  the folder with SGLang unpacked (site, model, jit, triton)     PACK  serve_sglang.sh and bench_sglang.py
OUT_DIR  what is to be kept: logs     START_SECONDS  that a server may take to start
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import grpc
from late_parts import LateParts

from kvferry.daemon.cli.stack import Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.proto import cache_pb2

ROOT = Path(os.environ.get("ROOT", Path.home() / "sgl"))
PACK = Path(os.environ.get("PACK", "build/sglang-pack/first"))
OUT = Path(os.environ.get("OUT_DIR", "build/sglang-out"))
READY = "fired up and ready"
START_SECONDS = float(os.environ.get("START_SECONDS", "240"))
STOP_SECONDS = 10.0
RADIX = ("--disaggregation-decode-enable-radix-cache",)
KVFERRY, NIXL, ALONE = "kvferry", "nixl", ""


class DidNotStart(RuntimeError):
    """A server ended, or was not ready in time; the message has the end of its log."""


@dataclass(frozen=True)
class System:
    """One way to serve: which backend, and the decode engine's flags."""

    name: str
    backend: str  # KVFERRY, NIXL, or ALONE for one server that does both
    flags: tuple[str, ...] = ()  # of decode
    host_bytes: str = "0"  # of kvferry's decode daemon
    waiting_bytes: str = "0"  # of its prefill daemon: computed prompts that wait for decode
    slots: int = 16
    ranks: int = 1  # tensor-parallel, of each engine
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """`flags` name its folder, or are more of its servers'; of each engine's pool the tokens."""

    flags: tuple[str, ...]
    prefill_tokens: int
    decode_tokens: int


class Machine:
    """One system's servers and daemons. A context: what it started is ended with it. Machines of different `place` run
    side by side."""

    def __init__(self, system: System, place: int = 0, page: int = 64, late: LateParts | None = None) -> None:
        """`late`: holds back what the systems' NIXLs write."""
        self.system = system
        self.late = late
        self.place = place
        self.page = page
        self.bootstrap_port = 8998 + place
        self.stack: Stack | None = None
        self.servers: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self._port(name)}"

    def _port(self, name: str) -> int:
        return 8100 + 20 * self.place + ("p", "d", "a").index(name[0])

    def _log(self, name: str) -> str:
        return f"{name}-{self.system.name}-{self.place}"

    # -- both

    def start_pair(self, model: Model) -> None:
        """Starts a prefill and a decode server, and daemons where kvferry has them; `wait` waits for the servers."""
        if self.system.backend == KVFERRY:
            self._start_daemons()
        self.start("p", model)
        self.start("d", model)

    def stop(self) -> None:
        """Ends everything; the logs are in OUT then. Idempotent."""
        self._stop_servers()
        self._stop_daemons()

    def say_errors(self, most: int = 12) -> None:
        """Prints the lines of the logs that an operator should read."""
        for name in self.servers:
            for line in self._errors(name, most):
                print(f"   {name}: {line}", flush=True)
        if self.stack is not None:
            print(self.daemon_tails(most), flush=True)
            try:
                print(self.stats("decode").transfers, self.stats("decode").host, flush=True)
            except grpc.RpcError as error:
                print(f"   decode's daemon does not answer: {error}", flush=True)

    # -- kvferry

    def _start_daemons(self) -> None:
        self.stack = Stack()
        port = 7070 + 2 * self.place
        listen = {"prefill": f"127.0.0.1:{port + 1}", "decode": f"127.0.0.1:{port}"}
        common = ["--pool", "engine", "--page-size", str(self.page), "--metrics", "off"]
        common += ["--slots", str(self.system.slots)]
        first, _ = ports_of(self.place)
        for number, role in enumerate(listen):
            words = ["serve", "--role", role, "--name", role, "--socket", self.socket(role), "--listen", listen[role]]
            gpus = gpus_of("d" if role == "decode" else "p", self.system.ranks)
            words += ["--device", ",".join(f"cuda:{gpu}" for gpu in gpus), *common]
            words += ["--ucx-ports", f"{first + 64 * number}-{first + 64 * number + 63}"]
            environment: dict[str, str] = {}
            if self.late is not None:
                words += ["--ucx-tls", "cuda_copy,tcp"]
                environment = self.late.preload
            if role == "decode":
                words += ["--peer", f"prefill={listen['prefill']}", "--host-bytes", self.system.host_bytes]
            else:
                words += ["--host-bytes", self.system.waiting_bytes]
            daemon = self.stack.start(f"{role}-daemon", words, environment=environment)
            self.stack.ready(daemon, START_SECONDS)

    def _stop_daemons(self) -> None:
        if self.stack is not None:
            for process in self.stack.processes:
                (OUT / f"{process.name}-{self.system.name}-{self.place}.log").write_text(process.tail(1 << 20))
            self.stack.close()
            self.stack = None

    def socket(self, role: str) -> str:
        assert self.stack is not None
        return str(Path(self.stack.folder) / f"{role}.sock")

    def stats(self, role: str) -> cache_pb2.SideStats:
        with grpc.insecure_channel(f"unix:{self.socket(role)}") as channel:
            return fetch(channel).sides[0]

    def daemon_tails(self, lines: int) -> str:
        if self.stack is None:
            return ""
        return "\n".join(f"-- {process.name}\n{process.tail(lines)}" for process in self.stack.processes)

    # -- SGLang

    def start(self, name: str, model: Model) -> None:
        """Starts a server: `name` is p, d, or a for one alone."""
        role = {"p": "prefill", "d": "decode", "a": "null"}[name]
        gpus = ",".join(map(str, gpus_of(name, self.system.ranks)))
        words = ["bash", str(PACK / "serve_sglang.sh"), self._log(name), gpus, str(self._port(name)), role]
        words += ["--tp-size", str(self.system.ranks)]
        words += [*model.flags, "--disaggregation-bootstrap-port", str(self.bootstrap_port)]
        words += self.system.flags if name == "d" else ()
        tokens = model.prefill_tokens if name == "p" else model.decode_tokens
        environment = {**os.environ, "TOKENS": str(tokens), "PAGE": str(self.page), **self.system.environment}
        environment["SGLANG_PLUGINS"] = self.system.backend if self.system.backend == KVFERRY else "none"
        if self.system.backend == KVFERRY:
            words += ["--disaggregation-transfer-backend", KVFERRY]
            environment["SGLANG_KVFERRY"] = json.dumps({"socket": self.socket(role), "revision": "bench"})
        elif self.late is not None:
            environment |= self.late.environment  # its NIXL is in the server
        self.servers[name] = subprocess.Popen(words, env=environment, cwd=OUT)

    def wait(self, seconds: float = START_SECONDS) -> None:
        """Waits until its servers are ready. DidNotStart."""
        end = time.monotonic() + seconds
        for name in self.servers:
            while READY not in self.log(name):
                if not self._lives(name) or time.monotonic() > end:
                    why = "is not ready in time" if self._lives(name) else "has ended"
                    tail = [line[:400] for line in self.log(name).splitlines() if line.strip()][-60:]
                    raise DidNotStart("\n".join([f"{self._log(name)} {why}:", *tail, self.daemon_tails(60)]))
                time.sleep(0.3)

    def log(self, name: str) -> str:
        path = ROOT / "log" / self._log(name)
        return path.read_text(errors="replace") if path.exists() else ""

    def _errors(self, name: str, most: int) -> list[str]:
        words = ("Error", "ERROR", "Traceback", "kvferry", "failed")
        found = [line[:300] for line in self.log(name).splitlines() if any(word in line for word in words)]
        return found[-most:]

    def _stop_servers(self) -> None:
        for name in self.servers:
            if self._lives(name):
                os.kill(self._pid(name), signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        for name, popen in self.servers.items():
            while self._lives(name) and time.monotonic() < end:
                time.sleep(0.2)
            if pid := self._pid(name):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            popen.wait(STOP_SECONDS)
            log = ROOT / "log" / self._log(name)
            if log.exists():
                shutil.move(log, OUT / f"{log.name}.log")
            log.with_name(f"{log.name}.pid").unlink(missing_ok=True)
        self.servers.clear()

    def _pid(self, name: str) -> int:
        path = ROOT / "log" / f"{self._log(name)}.pid"
        return int(path.read_text() or 0) if path.exists() else 0

    def _lives(self, name: str) -> bool:
        if not (pid := self._pid(name)):
            return self.servers[name].poll() is None
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return False
        return state not in "ZX"  # it has ended, and nobody has asked how


@cache
def gpu_memories() -> list[int]:
    """MiB of each GPU."""
    words = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    told = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60).stdout
    return [int(line) for line in told.split()]


def ports_of(place: int) -> tuple[int, int]:
    """The first and the last port of NIXL's at a place."""
    return 21000 + 128 * place, 21127 + 128 * place


def gpus_of(name: str, ranks: int) -> list[int]:
    """The GPUs of a server's ranks: decode's are others than prefill's, where there are as many."""
    there, first = len(gpu_memories()), 0 if name == "p" else ranks
    if there < ranks:
        raise DidNotStart(f"{ranks} ranks need as many GPUs; there are {there}")
    return list(range(first, first + ranks)) if there >= first + ranks else list(range(ranks))
