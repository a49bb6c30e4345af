"""Real vLLM processes on this machine: one alone, a pair with vLLM's own NixlConnector, or a pair joined by kvferry
(two daemons and the front end). Used by the scripts beside it.

VLLM_PYTHON   the interpreter that has vLLM (VLLM_DECODE_PYTHON: decode's)        VLLM_MODEL  a model's folder
VLLM_DEVICES  cuda:0, or cuda:0,cuda:1: as rank_devices.py shares them out to ranks; without it vLLM for CPUs
VLLM_PROGRAM  one of programs/ in the place of vLLM's API server     VLLM_FLAGS  more arguments, behind the scripts' own
VLLM_CACHES   a folder in which each server has its compile caches, by its name
VLLM_TIE      another token than the reference's is allowed where its two best logits are nearer (1e-3; bfloat16: 1e-2)
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import grpc
import httpx
import psutil

from kvferry.daemon.cli.stack import Process, Stack, lasting_port
from kvferry.daemon.cli.stats import fetch
from kvferry.proto import cache_pb2
from kvferry.workers.smollm import converted_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from rank_devices import devices_of
from small_models import model_of_heads

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("VLLM_PYTHON", ROOT / "build" / "vllm-venv" / "bin" / "python"))
DECODE_PYTHON = Path(os.environ.get("VLLM_DECODE_PYTHON", PYTHON))
MODEL_NAME = "smol"
ENGINES = ("alone", "prefill", "decode")
START_SECONDS = 600.0
STOP_SECONDS = 60.0
BLOCK = 32
CACHES = os.environ.get("VLLM_CACHES", "")
DEVICES = [name for name in os.environ.get("VLLM_DEVICES", "").split(",") if name]
PROGRAMS = Path(__file__).parent / "programs"
_SCRIPT = os.environ.get("VLLM_PROGRAM")
PROGRAM = (str(PROGRAMS / _SCRIPT),) if _SCRIPT else ("-m", "vllm.entrypoints.openai.api_server")
SIDE_PORT = 5600  # of NIXL's handshakes
LANE = int(os.environ.get("VLLM_LANE", "0"))  # 0 to 9: of clusters beside each other on a host; ports and addresses
GPU_SHARE = 0.2  # of a GPU's memory, for each engine
SCHEDULER = ("--scheduler-cls", "kvferry.connectors.vllm.scheduler.KVFerryScheduler")  # of decode engines
SMALL = ("--dtype", "float32", "--enforce-eager", "--block-size", str(BLOCK), "--max-model-len", "1024")
SMALL += ("--max-num-seqs", "16", "--max-num-batched-tokens", "512")  # of a step: longer prompts are computed in chunks


def ranks_of(pair: str) -> dict[str, int]:
    """A Spec's ranks from "P:D", those of prefill and of decode; of several the model has the heads. One alone has as
    many as prefill."""
    prefill, decode = map(int, pair.split(":"))
    if max(prefill, decode) > 1 and "VLLM_MODEL" not in os.environ:
        os.environ["VLLM_MODEL"] = str(model_of_heads())
    return {"alone": prefill, "prefill": prefill, "decode": decode}


class ClusterError(RuntimeError):
    """A process did not come up, or ended when it should not have."""


@dataclass(frozen=True, slots=True)
class Spec:
    decode_blocks: int = 0  # of the decode engine's KV cache; 0: as many as 1 GiB holds
    prefill_blocks: int = 0
    decode_bytes: int = 0  # the same on GPUs in bytes, of all ranks; 0: what GPU_SHARE leaves
    prefill_bytes: int = 0
    program: tuple[str, ...] = PROGRAM
    flags: tuple[str, ...] = SMALL  # of each engine
    decode_flags: tuple[str, ...] = ()  # beside them
    prefill_flags: tuple[str, ...] = ()
    daemon_flags: tuple[str, ...] = ()  # of each daemon
    page_size: int = BLOCK
    pool: str = "daemon"  # or "engine": its blocks are registered with the daemon
    pool_bytes: str = "512MiB"  # of each daemon
    host_bytes: str = "1GiB"  # of the decode daemon's host tier
    threads: int = 1  # of each engine
    ranks: Mapping[str, int] = field(default_factory=dict)  # tensor-parallel, by engine; else 1
    dp: int = 1  # data-parallel ranks of prefill and of decode, each with a daemon of its own, "prefill-0" ...
    first_token: str = "decode"  # the front end's --first-token
    prefills: int = 1  # prefill engines; of several, "prefill-0" ..., each has a daemon and devices of its own
    decodes: int = 1  # the same of decode
    connector_class: str = "kvferry.connectors.vllm:KVFerryConnector"
    extra: dict[str, object] = field(default_factory=dict)  # of kv_connector_extra_config
    extra_of: Mapping[str, Mapping[str, object]] = field(default_factory=dict)  # the same, by engine
    beside: dict[str, tuple[dict[str, object], ...]] = field(default_factory=dict)  # other connectors, by engine
    python: Path = PYTHON  # of the prefill engine, and of one alone
    decode_python: Path = DECODE_PYTHON


@dataclass(eq=False)
class Engine:
    name: str
    url: str
    popen: subprocess.Popen[bytes]
    log: Path
    again: Callable[[], Engine]  # starts another such process, on the same port

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Cluster:
    """A context: what it started is ended with it."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.stack = Stack()
        self.engines: dict[str, Engine] = {}
        self.daemons: dict[str, Process] = {}
        self._daemon_words: dict[str, list[str]] = {}
        self.front = ""  # URL of kvferry's front end
        logs = os.environ.get("VLLM_BENCH_LOGS")
        self._own = None if logs else tempfile.TemporaryDirectory(prefix="kvferry-vllm-")
        self.folder = Path(logs or self._own.name)  # type: ignore[union-attr]
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model = model_folder()

    def __enter__(self) -> Cluster:
        self._before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one does not leave servers behind
        self._end()
        signal.signal(signal.SIGTERM, self._before)

    def _end(self) -> None:
        for engine in self.engines.values():
            if engine.popen.poll() is None:
                engine.popen.send_signal(signal.SIGTERM)
        for engine in self.engines.values():
            try:
                engine.popen.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(engine.popen.pid, signal.SIGKILL)
                engine.popen.wait()
        self.stack.close()
        if self._own is not None:
            self._own.cleanup()

    @property
    def prefills(self) -> list[str]:
        """The prefill engines' names."""
        return names_of("prefill", self.spec.prefills)

    @property
    def decodes(self) -> list[str]:
        return names_of("decode", self.spec.decodes)

    # -- what there can be -----------------------------------------------------------------------------------------

    def alone(self) -> Engine:
        return self._wait(self._vllm("alone", None))

    def nixl(self) -> None:
        """Prefill and decode engines with vLLM's own connector; routers ask prefill first."""
        port = SIDE_PORT if CACHES else lasting_port()  # compile caches go by it: one for all, and so an address each
        for place, name in enumerate((*self.prefills, *self.decodes), 1):
            transfer: dict[str, object] = {
                "kv_connector": "NixlConnector",
                "kv_role": "kv_both",
                "kv_buffer_device": "cuda" if DEVICES else "cpu",
                "kv_load_failure_policy": "recompute",
            }
            side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": f"127.0.{LANE}.{place}", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
            self._vllm(name, self._with_others(name, transfer), side)
        self._wait_for_all()

    def start_nixl_front(self) -> None:
        decodes = ",".join(self.engines[name].url for name in self.decodes)
        words = [sys.executable, str(PROGRAMS / "nixl_front.py"), decodes]
        self.front = self.router([*words, *(self.engines[name].url for name in self.prefills)])

    def router(self, words: list[str], settings: dict[str, str] | None = None) -> str:
        """Starts another's, whose port stands behind the words: its URL."""
        port = lasting_port()
        return self._wait(self._spawn("front", port, [*words, str(port)], settings or {})).url

    def kvferry(self) -> None:
        self.start_daemons()
        here = [str(ROOT / "bench" / "vllm"), *filter(None, [os.environ.get("PYTHONPATH")])]
        for name in (*self.prefills, *self.decodes):
            self._vllm(name, self._with_others(name, self.transfer_of(name)), {"PYTHONPATH": os.pathsep.join(here)})
        self._wait_for_all()
        self.start_front()

    def decode_alone(self) -> Engine:
        """A decode engine, to which nobody sends; its daemon is there."""
        return self._wait(self._vllm("decode", self._with_others("decode", self.transfer_of("decode"))))

    def transfer_of(self, name: str) -> dict[str, object]:
        """The `kv_transfer_config` of an engine of the pair."""
        module, class_name = self.spec.connector_class.split(":")
        return {
            "kv_connector": class_name,
            "kv_connector_module_path": module,
            "kv_role": "kv_consumer" if role_of(name) == "decode" else "kv_producer",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "socket": self.socket_of(name if self.spec.dp == 1 else f"{name}-{{dp_rank}}"),
                "page_size": self.spec.page_size,
                "pool": self.spec.pool,
                **self.spec.extra,
                **self.spec.extra_of.get(name, {}),
            },
        }

    def _with_others(self, name: str, transfer: dict[str, object]) -> dict[str, object]:
        """The connector, behind those that the specification has beside it."""
        others = self.spec.beside.get(name)
        if not others:
            return transfer
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [*others, transfer]},
        }

    def start_front(self, decodes: Sequence[str] = ()) -> None:
        """One for these decode engines alone; none: for all of them."""
        words = ["front", "--listen", "127.0.0.1:0", "--first-token-seconds", "240", "--next-token-seconds", "240"]
        if alone := self.engines.get("alone"):
            words += ["--vllm-decode", alone.url]
        else:
            rank, ranks = ("", "") if self.spec.dp == 1 else ("-{dp_rank}", f",{self.spec.dp}")
            words += ["--vllm-prefill", *(f"{name}{rank}={self.engines[name].url}{ranks}" for name in self.prefills)]
            words += ["--vllm-decode", *(self.engines[name].url + ranks for name in decodes or self.decodes)]
            if self.spec.first_token != "decode":  # trees that are compared may not know the flag
                words += ["--first-token", self.spec.first_token]
        front = self.stack.start("front", words)
        self.front = f"http://{self.stack.ready(front)}"

    # -- daemons ---------------------------------------------------------------------------------------------------

    def socket_of(self, name: str) -> str:
        return str(Path(self.stack.folder) / f"{name}.sock")

    def start_daemons(self) -> None:
        """Starts each engine's, or data-parallel rank's; every decode daemon has all of prefill as peers."""
        pool = ["--pool", "engine"] if self.spec.pool == "engine" else ["--pool-bytes", self.spec.pool_bytes]
        common = ["--page-size", str(self.spec.page_size), *pool, *self.spec.daemon_flags]
        peers: list[str] = []
        for place, (engine, rank) in enumerate(product((*self.prefills, *self.decodes), range(self.spec.dp))):
            name, listen = self.daemon_of(engine, rank), f"127.0.0.1:{lasting_port()}"
            role = role_of(engine)
            words = ["serve", "--role", role, "--name", name, "--listen", listen, *common]
            words += ["--socket", self.socket_of(name), "--ucx-ports", ucx_ports(place)]
            if DEVICES:
                own = self._devices(engine)
                words += ["--device", ",".join(own if self.spec.dp == 1 else own[rank : rank + 1])]
            else:
                words += ["--ranks", str(self.spec.ranks.get(role, 1))]
            if role == "prefill":
                peers += ["--peer", f"{name}={listen}"]
            else:
                words += [*peers, "--host-bytes", self.spec.host_bytes]
            self._daemon_words[name] = words
            self.start_daemon(name)

    def daemon_of(self, engine: str, rank: int = 0) -> str:
        """Name of a data-parallel rank's daemon."""
        return engine if self.spec.dp == 1 else f"{engine}-{rank}"

    def daemons_of(self, role: str) -> list[str]:
        """Names of the daemons of one role."""
        return [name for name in self._daemon_words if role_of(name) == role]

    def start_daemon(self, name: str) -> None:
        self.daemons[name] = self.stack.start(f"{name}-daemon", self._daemon_words[name])
        self.stack.ready(self.daemons[name])

    def kill_daemon(self, name: str) -> None:
        self.stack.kill(self.daemons[name])
        self.stack.processes.remove(self.daemons[name])

    def stats(self, name: str) -> cache_pb2.SideStats:
        with grpc.insecure_channel(f"unix:{self.socket_of(name)}") as channel:
            return fetch(channel).sides[0]

    # -- vLLM ------------------------------------------------------------------------------------------------------

    def metric(self, name: str, metric: str) -> float:
        """The sum of one of an engine's Prometheus samples over its labels."""
        text = httpx.get(self.engines[name].url + "/metrics", trust_env=False, timeout=30).text
        return sum(float(value) for value in re.findall(rf"^{re.escape(metric)}(?:\{{.*\}})? (\S+)$", text, re.M))

    def _vllm(self, name: str, transfer: dict[str, object] | None, environment: dict[str, str] | None = None) -> Engine:
        role = role_of(name)
        python = self.spec.decode_python if role == "decode" else self.spec.python
        if not python.exists():
            raise ClusterError(f"no vLLM at {python}: bench/vllm/venv.sh makes its environment (or set VLLM_PYTHON)")
        port = lasting_port()
        words = [str(python), *self.spec.program, "--model", str(self.model)]
        words += ["--served-model-name", MODEL_NAME, "--host", "127.0.0.1", "--port", str(port)]
        words += ["--disable-uvicorn-access-log", *self.spec.flags, *shlex.split(os.environ.get("VLLM_FLAGS", ""))]
        blocks = 0
        if name != "alone":
            words += self.spec.decode_flags if role == "decode" else self.spec.prefill_flags
            blocks = self.spec.decode_blocks if role == "decode" else self.spec.prefill_blocks
        if (ranks := self.spec.ranks.get(role, 1)) > 1:
            words += ["--tensor-parallel-size", str(ranks)]
        if self.spec.dp > 1 and name != "alone":
            words += ["--data-parallel-size", str(self.spec.dp)]
        if blocks:
            words += ["--num-gpu-blocks-override", str(blocks)]
        if transfer is not None:
            words += ["--kv-transfer-config", json.dumps(transfer)]
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": str(self.spec.threads),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        if DEVICES:
            words += ["--gpu-memory-utilization", str(GPU_SHARE)]
            if kv_bytes := self.spec.decode_bytes if role == "decode" else self.spec.prefill_bytes:
                words += ["--kv-cache-memory-bytes", str(kv_bytes // ranks)]
            settings["CUDA_VISIBLE_DEVICES"] = ",".join(each.removeprefix("cuda:") for each in self._devices(name))
        if CACHES:  # one for each: two that compile at once do not share
            root = Path(CACHES) / name
            settings["VLLM_CACHE_ROOT"] = str(root)
            settings["TRITON_CACHE_DIR"] = str(root / "triton")
            settings["TORCHINDUCTOR_CACHE_DIR"] = str(root / "inductor")
        return self._spawn(name, port, words, {**settings, **(environment or {})})

    def _devices(self, name: str) -> list[str]:
        role, _, number = name.partition("-")
        ranks = {role: self.spec.ranks.get(role, 1) if self.spec.dp == 1 else self.spec.dp for role in ENGINES}
        if role == "alone" or number:
            back = self.spec.decodes * ranks[role] if role == "decode" else len(DEVICES)
            first = len(DEVICES) - back + int(number or 0) * ranks[role]
            return DEVICES[first : first + ranks[role]]
        return devices_of(DEVICES, ranks["prefill"], ranks["decode"])[role == "decode"]

    def _spawn(self, name: str, port: int, words: list[str], settings: dict[str, str]) -> Engine:
        log = self.folder / f"{name}-{port}.log"
        with log.open("ab") as output:
            popen = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=self.folder,
                env={**os.environ, **settings}, start_new_session=True,
            )  # fmt: skip
        again = partial(self._spawn, name, port, words, settings)
        engine = self.engines[name] = Engine(name, f"http://127.0.0.1:{port}", popen, log, again)
        return engine

    def kill_rank(self, name: str) -> None:
        """Kills the process of an engine's last rank, whereupon vLLM ends the engine, and starts the engine anew."""
        engine = self.engines[name]
        of_rank = "Worker" if self.spec.dp == 1 else "EngineCore"
        ranks = [
            child for child in psutil.Process(engine.popen.pid).children(recursive=True)
            if any(of_rank in word for word in child.cmdline())
        ]  # fmt: skip
        assert ranks, f"{name} has no processes of ranks"
        max(ranks, key=lambda child: child.cmdline()[0]).kill()
        engine.popen.wait(STOP_SECONDS)
        self._wait(engine.again())

    def _wait_for_all(self) -> None:
        for engine in self.engines.values():
            self._wait(engine)

    def _wait(self, engine: Engine) -> Engine:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if engine.popen.poll() is not None:
                raise ClusterError(f"{engine.name} ended with {engine.popen.returncode}:\n{engine.tail()}")
            try:
                if httpx.get(engine.url + "/health", trust_env=False, timeout=5).status_code == 200:
                    return engine
            except httpx.TransportError:
                pass
            time.sleep(0.5)
        raise ClusterError(f"{engine.name} was not up within {START_SECONDS:g} s:\n{engine.tail()}")


def names_of(role: str, engines: int) -> list[str]:
    return [role] if engines == 1 else [f"{role}-{number}" for number in range(engines)]


def role_of(name: str) -> str:
    """The role of an engine or a daemon."""
    return name.partition("-")[0]


def model_folder() -> Path:
    """VLLM_MODEL, or SmolLM2-135M-Instruct as the demo of kvferry converts it."""
    named = os.environ.get("VLLM_MODEL")
    return Path(named) if named else converted_model()


def ucx_ports(place: int) -> str:
    first = 12100 + 1000 * LANE + 32 * place  # below all that `lasting_port` gives
    return f"{first}-{first + 31}"


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "?")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return f"{os.cpu_count()} cores of {model}, commit {commit.stdout.strip() or 'unknown'}"


class Log:
    """Lines of one result, shown as they come and kept in a file, where one is given."""

    def __init__(self, path: Path | None, command: str = "") -> None:
        """command: as the first line shows it; "": with all its arguments."""
        self.path = path
        self.lines: list[str] = []
        self.add(f"{machine()}; {command or ' '.join(sys.argv)}; {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC")

    def add(self, *lines: str) -> None:
        self.lines += lines
        print(*lines, sep="\n", flush=True)
        if self.path is not None:
            self.path.write_text("\n".join(self.lines) + "\n")


__all__ = [
    "SCHEDULER",
    "Cluster",
    "ClusterError",
    "Engine",
    "Log",
    "Spec",
    "machine",
    "model_folder",
    "replace",
]
