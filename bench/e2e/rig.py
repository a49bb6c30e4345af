"""A whole system of synthetic engines on this machine, load on it, and its report in the model's time."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import grpc
import httpx

from kvferry.daemon.cli.stack import Process, Stack
from kvferry.daemon.cli.stats import fetch
from kvferry.daemon.cli.system import SystemSpec, start_system
from kvferry.loadgen.files import read_report
from kvferry.loadgen.report import Goodput, Report, Summary
from kvferry.proto import cache_pb2 as cache
from kvferry.proto import common_pb2 as common

HERE = Path(__file__).parent
NO_PROXY = [("grpc.enable_http_proxy", 0)]
PATIENCE = "3600"  # seconds: what waits here waits for its turn, not for what is broken
HEAD_ROOM = 1.02  # of prefill pools
WRONG_PAGE = " ERROR kvferry.workers.ending: "  # in a worker's log, before what it says of a wrong page or token


class RigError(RuntimeError):
    """A run that cannot be used."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Pools in pages; a page has `page_bytes` here, whatever it stands for."""

    decode_pages: int
    prefill_pages: int
    engine: Path | None  # None: as fast as it goes
    clock: float = 1.0
    prefills: int = 1
    decodes: int = 1
    page_size: int = 64
    page_bytes: int = 4096
    reuse: str = "on"
    host_pages: int = 0
    max_running: int = 0
    stream_interval: int = 8
    chunk_tokens: int = 8192
    local_prefill_max_tokens: int = 0
    policy: str = "lru"
    way_back: str = "off"
    look_ups: str = "on"
    ucx_ports: str = "25000-25255"
    decode_flags: Sequence[str] = field(default=())
    front_flags: Sequence[str] = field(default=())

    def spec(self, shm: str) -> SystemSpec:
        head_dim, rest = divmod(self.page_bytes, self.page_size * 2 * 2)  # one layer, K and V, one head of float16
        if rest or not head_dim:
            raise RigError(f"page_bytes is {self.page_bytes}; it must be a multiple of {4 * self.page_size}")
        daemon = ["--shm-dir", shm, "--slots", "4", "--slot-bytes", "4MiB", "--ucx-ports", self.ucx_ports]
        daemon += ["--peer-lost-seconds", "60"]  # a machine that stands still for a while is no dead peer
        daemon += ["--way-back", self.way_back, "--look-ups", self.look_ups]
        daemon += ["--admission-seconds", PATIENCE, "--transfer-seconds", PATIENCE, "--log-level", "warning"]
        host = ["--host-bytes", str(self.host_pages * self.page_bytes)] if self.host_pages else []
        worker = ["--synthetic-layers", "1", "--synthetic-kv-heads", "1", "--synthetic-head-dim", str(head_dim)]
        worker += ["--dtype", "float16"]
        if self.engine is not None:
            worker += ["--engine-model", str(self.engine), "--clock", str(self.clock)]
        worker += ["--chunk-tokens", str(self.chunk_tokens), "--grace", "5"]
        decode_worker = ["--stream-interval", str(self.stream_interval), "--max-running", str(self.max_running)]
        decode_worker += ["--local-prefill-max-tokens", str(self.local_prefill_max_tokens)]
        return SystemSpec(
            prefills=self.prefills,
            decodes=self.decodes,
            page_size=self.page_size,
            decode_pool_bytes=self.decode_pages * self.page_bytes,
            prefill_pool_bytes=self.prefill_pages * self.page_bytes,
            decode_flags=[*daemon, *host, "--reuse", self.reuse, "--policy", self.policy, *self.decode_flags],
            prefill_flags=daemon,
            worker_flags=worker,
            decode_worker_flags=decode_worker,
            front_flags=["--first-token-seconds", PATIENCE, "--next-token-seconds", PATIENCE, *self.front_flags],
        )


@dataclass(frozen=True, slots=True)
class Run:
    """`report` is in the model's time."""

    setup: Setup
    report: Report
    decode: cache.SideStats
    prefills: tuple[cache.SideStats, ...]
    engine_log: tuple[str, ...]  # what the workers said at their end

    @property
    def hit_share(self) -> float:
        requests = self.decode.requests
        return requests.hit_tokens / requests.queried_tokens if requests.queried_tokens else 0.0

    @property
    def fetched_tokens(self) -> int:
        return sum(side.way_back.fetched_tokens for side in self.prefills)

    @property
    def computed_tokens(self) -> int:
        """Of prompts, by all prefill servers."""
        asked = sum(side.requests.queried_tokens - side.requests.hit_tokens for side in self.prefills)
        return asked - self.fetched_tokens


def run(setup: Setup, load: Sequence[str], *, limit_s: float = 3600.0) -> Run:
    """`load`: flags of `kvferry loadgen`. Raises RigError where a request fails, and where `judge` does."""
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="kvferry-e2e-", dir=shm) as folder, Stack() as stack:
        system = start_system(stack, setup.spec(folder))
        report = drive(system.url, [*_stats(system.decodes), *load], limit_s)
        decode = _side(system.decodes[0].daemon_address, common.ROLE_DECODE)
        prefills = tuple(_side(replica.daemon_address, common.ROLE_PREFILL) for replica in system.prefills)
        again = tried_again(system.url)
        workers = [replica.worker for replica in (*system.decodes, *system.prefills)]
        log = _last_words(stack, workers)
        wrong = wrong_pages([Path(worker.log_path) for worker in workers])
    judge(decode.pool, wrong, again)
    return Run(setup, in_model_time(report, setup.clock), decode, prefills, log)


def tried_again(front: str) -> int:
    """Prefills, by this front end, at another worker."""
    return int(httpx.get(f"{front}/kvferry/stats", trust_env=False).json()["tried_again"])


def judge_workers(wrong: Sequence[str], tried_again: int) -> None:
    """Where a prefill worker saw a wrong page, another one may have served the request. Raises RigError."""
    if wrong:
        raise RigError(f"{len(wrong)} wrong pages, the first: {wrong[0]}")
    if tried_again:
        raise RigError(f"the front end tried {tried_again} prefills again at another worker")


def wrong_pages(logs: Iterable[Path]) -> list[str]:
    """What workers said of wrong pages and tokens."""
    lines = (line for log in logs for line in log.read_text(errors="replace").splitlines())
    return [said for line in lines if (said := line.partition(WRONG_PAGE)[2])]


def judge(pool: cache.PoolStats, wrong: Sequence[str], tried_again: int) -> None:
    """Of a run whose requests were all answered. Raises RigError, also where pages do not add up."""
    judge_workers(wrong, tried_again)
    states = (pool.free, pool.leased, pool.arriving, pool.cached, pool.spilling, pool.restoring, pool.orphaned)
    if sum(states) != pool.pages:
        raise RigError(f"the decode pool's states {states} do not sum to its {pool.pages} pages")


def drive(url: str, load: Sequence[str], limit_s: float) -> Report:
    """The load generator in a process of its own. RigError where a request failed, or a daemon was started anew."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        words = ["loadgen", "--url", url, "--timeout", PATIENCE, "--json", str(path), *load]
        done = subprocess.run(
            [sys.executable, "-m", "kvferry", *words], stdout=subprocess.PIPE, text=True, timeout=limit_s, check=False
        )
        if not path.exists():
            raise RigError(f"the load ended with {done.returncode}: {done.stdout[-2000:]}")
        report = read_report(path)
    if not report.ok:
        raise RigError(f"{report.failed} of {report.requests} requests failed: {report.errors}")
    if report.daemons_missing is not None:
        raise RigError(f"no statistics of the daemons: {report.daemons_missing}")
    return report


def in_model_time(report: Report, clock: float) -> Report:
    """A report of a run whose waits were `clock` times shorter."""
    changes: dict[str, object] = {"duration_s": report.duration_s * clock}
    for entry in fields(Report):
        value = getattr(report, entry.name)
        if entry.name.endswith("_per_s"):
            changes[entry.name] = value / clock
        elif entry.name.endswith("_ms") and isinstance(value, Summary):
            changes[entry.name] = _scaled(value, clock)
    changes["ttft_by_turn_ms"] = tuple(_scaled(turn, clock) for turn in report.ttft_by_turn_ms)
    if report.goodput is not None:
        goodput = report.goodput
        changes["goodput"] = Goodput(goodput.target, goodput.requests, goodput.requests_per_s / clock)
    return replace(report, **changes)  # type: ignore[arg-type]


def _scaled(values: Summary, factor: float) -> Summary:
    scaled = (getattr(values, entry.name) * factor for entry in fields(Summary)[1:])
    return Summary(values.count, *scaled)


def _stats(replicas: Iterable[object]) -> list[str]:
    return [word for replica in replicas for word in ("--stats", replica.daemon_address)]  # type: ignore[attr-defined]


def _side(address: str, role: common.Role) -> cache.SideStats:
    with grpc.insecure_channel(address, NO_PROXY) as channel:
        return next(side for side in fetch(channel).sides if side.role == role)


def _last_words(stack: Stack, workers: Iterable[Process]) -> tuple[str, ...]:
    words: list[str] = []
    for worker in workers:
        stack.stop(worker)
        lines = Path(worker.log_path).read_text(errors="replace").splitlines()
        name = worker.name.removesuffix("-worker")
        said = (line.partition(" INFO kvferry.workers.models.pacing: ")[2] for line in lines)
        words += [f"{name}: {end}" for end in said if end]
    return tuple(words)
