"""The daemon's process: sockets, services, signals, and the order in which it starts and ends. Shell."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from grpc_health.v1 import health_pb2_grpc

from kvferry.daemon import backstop
from kvferry.daemon.capabilities import capabilities
from kvferry.daemon.config.model import DaemonConfig, flag_of, new_incarnation
from kvferry.daemon.config.values import ConfigError, size
from kvferry.daemon.grpc_servers import CALLS_PER_CLIENT, GrpcServers, make_servers
from kvferry.daemon.memory.capacity import host_lacks, index_lacks
from kvferry.daemon.observe.health import HealthWatch
from kvferry.daemon.observe.room import RoomWatch
from kvferry.daemon.observe.stats import Snapshots
from kvferry.daemon.peers.dialing import dialling
from kvferry.daemon.peers.handshake import without_effect
from kvferry.daemon.peers.tls import TlsWatch, files_of
from kvferry.daemon.services.admin import AdminService
from kvferry.daemon.services.cache import CacheService
from kvferry.daemon.services.health import DAEMON, HealthService
from kvferry.daemon.services.peer import PeerService
from kvferry.daemon.services.worker import WorkerService
from kvferry.daemon.services.worker_frames import FramedWorkers
from kvferry.daemon.sides.decode import DecodeSide
from kvferry.daemon.sides.prefill import PrefillSide
from kvferry.daemon.sides.side import AnySide
from kvferry.daemon.socket_file import SocketFile, clear_socket
from kvferry.frames import SUFFIX
from kvferry.proto import (
    admin_pb2,
    admin_pb2_grpc,
    cache_pb2,
    cache_pb2_grpc,
    peer_pb2,
    peer_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from kvferry.proto.health import ENGINE_SERVICE
from kvferry.signals import end_signals
from kvferry.transfer.courier.link import CourierError
from kvferry.transfer.mapping.segment import FileLock, owned_files, reclaim_stale
from kvferry.waiting import within

log = logging.getLogger(__name__)

TICK_SECONDS = 0.05
SPILL_SHARE = 0.2  # of the grace period, kept for saving the cache in the host tier's file where there is one
END_SECONDS = 20.0  # after the grace period, for all that is to end then
SESSIONS_SECONDS = 15.0  # of it, for the sessions of decode daemons
POLL_SECONDS = 0.05  # between looks at what still runs
ENGINE_SECONDS = 0.5  # between two looks


@dataclass(frozen=True, slots=True)
class _Running:
    """Parts that are there once the daemon serves."""

    servers: GrpcServers
    framed: FramedWorkers
    workers: WorkerService


class Daemon:
    """`await start()`, then `await run_until_stopped()`; or `stop()` from a signal. `leave` ends the process at once,
    where its orderly end takes longer than END_SECONDS."""

    def __init__(self, config: DaemonConfig, leave: Callable[[int], None] | None = None) -> None:
        self.config = config
        self._leave = leave
        self.incarnation = new_incarnation()
        self.address = ""  # HOST:PORT once it listens
        self._lock: FileLock | None = None
        self._sockets: list[SocketFile] = []
        self._running: _Running | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._stop = asyncio.Event()
        self._fatal: BaseException | None = None
        files = files_of(config)
        self._tls = TlsWatch(files) if files is not None else None
        dial = dialling(self._tls)
        self.sides: dict[str, AnySide] = {}
        if "decode" in config.roles:
            self.sides["decode"] = DecodeSide(config, self.incarnation, time.monotonic, dial)
        if "prefill" in config.roles:
            self.sides["prefill"] = PrefillSide(config, self.incarnation, time.monotonic)
        self._health = HealthService()
        self._watch = HealthWatch(self.sides, config.stalled_seconds, lambda serving: self._announce())
        self._room = RoomWatch(config, self.sides, self._announce)
        self._snapshots = Snapshots(config.name, self.sides, time.monotonic, self._tls)
        self._snapshots.watch, self._snapshots.room = self._watch, self._room
        self._capabilities = capabilities(config, self.sides, self._snapshots, dial, self._watch_task)

    def stop(self) -> None:
        self._stop.set()

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            log.info("%s: draining, %d requests run", number.name, sum(side.busy for side in self.sides.values()))
        self.stop()

    # -- its start -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Listens; ConfigError where it cannot."""
        config = self.config
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_loop_error)
        for number in end_signals():
            loop.add_signal_handler(number, self._on_signal, number)  # before anybody hears that it is ready
        self._look_at_the_machine()
        for lack in host_lacks(config) + index_lacks(config):
            log.warning("what is asked for does not fit: %s", lack)
        await self._room.look()
        clear_socket(config.socket)
        servers = make_servers(config, self._snapshots.rpcs, self._tls)
        self.address = servers.bind_tcp(config.listen, self._tls)
        workers = self._add_services(servers)
        self._sockets.append(servers.bind_unix(config.socket))
        for capability in self._capabilities:
            capability.start()
        await servers.start()
        os.chmod(config.socket, 0o600)
        framed = FramedWorkers(workers.serve, CALLS_PER_CLIENT * config.worker_processes)
        try:
            await framed.start(config.socket + SUFFIX)
        except OSError as error:
            raise ConfigError(f"--socket: cannot listen on {config.socket + SUFFIX!r}: {error.strerror}") from error
        self._sockets.append(SocketFile(config.socket + SUFFIX))
        self._running = _Running(servers, framed, workers)
        self._start_tasks()

    def _look_at_the_machine(self) -> None:
        """ConfigError where it is not enough. From here on a lock says that this daemon's files are somebody's."""
        config = self.config
        _check_descriptors(config)
        _check_host_dir(config)
        if config.pool == "engine" and (idle := sorted({"pool_bytes", "storage"} & config.model_fields_set)):
            log.warning("%s: said, but with --pool engine the engine says it", ", ".join(map(flag_of, idle)))
        reclaimed = reclaim_stale(config.shm_dir)
        if reclaimed:
            log.warning("removed %d files that dead daemons left in %s", len(reclaimed), config.shm_dir)
        self._lock = FileLock.create_held(os.path.join(config.shm_dir, f"kvferry-{self.incarnation.hex()}-lock"))

    def _add_services(self, servers: GrpcServers) -> WorkerService:
        """Workers and operators by the Unix socket, prefill's peers by TCP, look-ups and health by both."""
        workers = WorkerService(self.sides, self.address)
        worker_pb2_grpc.add_WorkerServicer_to_server(workers, servers.unix)
        admin_pb2_grpc.add_AdminServicer_to_server(AdminService(self.sides), servers.unix)
        cache = CacheService(self.sides, self._snapshots)
        services = [cache_pb2.DESCRIPTOR.services_by_name["Cache"].full_name]
        for server in (servers.tcp, servers.unix):
            cache_pb2_grpc.add_CacheServicer_to_server(cache, server)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        prefill = self.sides.get("prefill")
        if isinstance(prefill, PrefillSide):
            peer_pb2_grpc.add_PeerServicer_to_server(PeerService(prefill), servers.tcp)
            services.append(peer_pb2.DESCRIPTOR.services_by_name["Peer"].full_name)
        if self.config.reflection:
            local = [
                admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
                worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name,
            ]
            servers.reflect(services, [*services, *local])
        return workers

    def _start_tasks(self) -> None:
        if told := without_effect(self.config):
            log.warning("%s", told)
        loops = [self._tick(), self._watch.run(), self._room.run(), self._tell_of_engines()]
        if self._tls is not None:
            loops.append(self._tls.run())
        decode = self.sides.get("decode")
        if isinstance(decode, DecodeSide):
            loops += [link.run() for link in decode.links.values()]
            if decode.links:
                told = ", ".join(f"{link.name} at {link.address}" for link in decode.links.values())
                log.info("peers: %s; they are dialled once the first decode worker is here", told)
        for capability in self._capabilities:
            loops += capability.loops()
        self._tasks = [asyncio.create_task(loop) for loop in loops]
        for task in self._tasks:
            self._watch_task(task)

    # -- its end -------------------------------------------------------------------------------------------------

    def discard(self) -> None:
        """Leaves no file and no thread behind, whatever failed before."""
        with contextlib.ExitStack() as ends:  # each is reached, though another fails; the last first
            if self._lock is not None:
                ends.callback(self._lock.close)
                ends.callback(self._unlink_lock, self._lock)
            for socket in self._sockets:
                ends.callback(socket.remove)
            for capability in self._capabilities:
                ends.callback(capability.close)

    def _unlink_lock(self, lock: FileLock) -> None:
        """Removes the lock file, without which nobody would ever remove the files that are still there."""
        if left := owned_files(self.config.shm_dir, self.incarnation):
            log.error("%d files are left in %s; the next daemon there removes them", len(left), self.config.shm_dir)
        else:
            lock.unlink()

    async def run_until_stopped(self) -> None:
        """Serves until `stop()` or a broken invariant; drains, then ends everything it owns."""
        await self._stop.wait()
        await self._drain()
        if self._leave is not None:
            backstop.arm(END_SECONDS, self._leave, self.config.shm_dir, self.incarnation)
        await self._end()
        if self._fatal is not None:
            raise self._fatal
        log.info("ended")

    async def _drain(self) -> None:
        """No new work; what was accepted may finish within the grace period."""
        for side in self.sides.values():
            side.draining = True
        self._health.drain()
        end = time.monotonic() + self.config.grace_seconds
        busy = sum(side.busy for side in self.sides.values())
        if busy and self._fatal is None:
            saves = any(side.saves for side in self.sides.values())
            seconds = self.config.grace_seconds * (1 - SPILL_SHARE if saves else 1)
            log.info("%d requests have %.0f s at most", busy, seconds)
            deadline = end - self.config.grace_seconds + seconds
            while sum(side.busy for side in self.sides.values()) and time.monotonic() < deadline:
                if self._fatal is not None:
                    return
                await asyncio.sleep(POLL_SECONDS)
        if self._fatal is None:
            saving = [asyncio.create_task(side.spill_all(end)) for side in self.sides.values()]
            for task in saving:
                self._watch_task(task)
            await asyncio.wait(saving)

    async def _end(self) -> None:
        try:
            await self._end_services()
        finally:
            try:
                await self._close_sides()
            finally:
                self.discard()

    async def _close_sides(self) -> None:
        """All of them, though one fails."""
        ends = await asyncio.gather(*(side.close() for side in self.sides.values()), return_exceptions=True)
        for side, error in zip(self.sides.values(), ends, strict=True):
            if error is not None:
                log.error("%s: its end failed: %s: %s", side.role, type(error).__name__, error)
        for error in filter(None, ends):
            raise error

    async def _end_services(self) -> None:
        while running := [task for task in self._tasks if not task.done()]:
            # Again and again: before Python 3.12 wait_for can lose a cancellation that meets its result.
            for task in running:
                task.cancel()
            await asyncio.wait(running, timeout=1.0)
        for capability in reversed(self._capabilities):
            await capability.end()
        assert self._running is not None, "start() has returned"
        if self._fatal is None:
            self._running.workers.end_sessions()
        await asyncio.gather(self._running.servers.stop(0.5), self._running.framed.stop(0.5))
        await asyncio.sleep(0)  # handlers that were cancelled have run their ends
        prefill = self.sides.get("prefill")
        if isinstance(prefill, PrefillSide):
            with contextlib.suppress(asyncio.TimeoutError):
                await within(SESSIONS_SECONDS, _end_of_sessions(prefill))

    async def _tell_of_engines(self) -> None:
        """Says to whoever asks for the health of ENGINE_SERVICE whether hand-offs to this daemon are of use."""
        while True:
            why = [f"{side.role}: no engine is connected" for side in self.sides.values() if not side.has_engine]
            self._health.set(ENGINE_SERVICE, [*why, *self._reasons()])
            await asyncio.sleep(ENGINE_SECONDS)

    def _announce(self) -> None:
        self._health.set(DAEMON, self._reasons())

    def _reasons(self) -> list[str]:
        """Why it serves nobody; none: it serves."""
        return [*(f"stalled: {part}" for part in self._watch.stalled), *self._room.lacks]

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            late = max(0.0, loop.time() - due)
            self._snapshots.loop_lag.add(late)
            for side in self.sides.values():
                side.tick(late)

    def _watch_task(self, task: asyncio.Task[None]) -> None:
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(error)

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """A broken invariant in a callback: going on could hand out a wrong byte."""
        error = context.get("exception")
        if isinstance(error, (AssertionError, CourierError)):
            self._die(error)
        else:
            loop.default_exception_handler(context)

    def _die(self, error: BaseException) -> None:
        log.critical("an invariant is broken; the daemon ends", exc_info=error)
        self._fatal = self._fatal or error
        for side in self.sides.values():
            side.halt()
        self._stop.set()


async def _end_of_sessions(side: PrefillSide) -> None:
    while side.sessions:
        await asyncio.sleep(0.02)


def _check_descriptors(config: DaemonConfig) -> None:
    """Raises the soft limit of open files as far as it may; ConfigError where that is not enough."""
    need = config.open_files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < need:
        raise ConfigError(
            f"--max-peers {config.max_peers} and --max-workers {config.max_workers} need {need} open files; "
            f"the limit (RLIMIT_NOFILE) is {hard}"
        )
    if soft != resource.RLIM_INFINITY and soft < need:
        resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def _check_host_dir(config: DaemonConfig) -> None:
    """Makes it, 0700; ConfigError where files cannot be made in it. They are opened when a worker names its model."""
    if not config.host_dir:
        return
    is_new = not os.path.isdir(config.host_dir)
    try:
        os.makedirs(config.host_dir, mode=0o700, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--host-dir {config.host_dir!r}: {error.strerror}") from error
    if not os.access(config.host_dir, os.W_OK | os.X_OK):
        raise ConfigError(f"--host-dir {config.host_dir!r} cannot be written to")
    if is_new:
        free = size(shutil.disk_usage(config.host_dir).free)
        log.info("--host-dir %s is new; %s are free there", config.host_dir, free)
