"""A whole serving system on loopback: prefill and decode daemons, their workers, and a front end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.daemon.cli.stack import Process, Stack


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """A system to be started. `model` is a folder of a causal language model, `random_weights` the shape of an
    untrained one; both empty: synthetic workers. Devices are those of `kvferry serve --device`, one for each rank; a
    worker computes on the first.
    """

    model: str = ""
    random_weights: str = ""
    prefill_device: str = "cpu"
    decode_device: str = "cpu"
    prefills: int = 1
    decodes: int = 1
    decode_pool_bytes: int = 1 << 30
    prefill_pool_bytes: int = 1 << 30
    page_size: int = 64
    decode_flags: Sequence[str] = ()
    prefill_flags: Sequence[str] = ()
    worker_flags: Sequence[str] = ()
    prefill_worker_flags: Sequence[str] = ()
    decode_worker_flags: Sequence[str] = ()
    front_flags: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Replica:
    """One daemon and its worker."""

    name: str
    daemon: Process
    worker: Process
    daemon_address: str  # peers, statistics, look-ups
    worker_address: str  # Engine service
    socket: str


_Started = tuple[Process, str, str]  # a daemon with its name and its socket


@dataclass(frozen=True, slots=True)
class StartedDaemons:
    """The daemons of a system whose workers are not started yet."""

    prefills: list[_Started]
    decodes: list[_Started]
    addresses: list[str]  # of all, prefill first


@dataclass(frozen=True, slots=True)
class System:
    prefills: tuple[Replica, ...]
    decodes: tuple[Replica, ...]
    url: str  # of the front end


def start_system(stack: Stack, spec: SystemSpec) -> System:
    """Starts everything and waits until it serves. StackError where something does not."""
    return start_engines(stack, spec, start_daemons(stack, spec))


def start_engines(stack: Stack, spec: SystemSpec, daemons: StartedDaemons) -> System:
    """Starts workers beside the daemons, and the front end."""
    prefills, decodes = _start_workers(stack, spec, daemons)
    words = ["front", "--listen", "127.0.0.1:0", *spec.front_flags]
    for replica in prefills:
        words += ["--prefill", replica.worker_address]
    for replica in decodes:
        words += ["--decode", replica.worker_address]
    return System(prefills, decodes, f"http://{stack.ready(stack.start('front', words))}")


def start_replicas(stack: Stack, spec: SystemSpec) -> tuple[tuple[Replica, ...], tuple[Replica, ...]]:
    """Daemons and workers without a front end: (prefill, decode)."""
    return _start_workers(stack, spec, start_daemons(stack, spec))


def start_daemons(stack: Stack, spec: SystemSpec) -> StartedDaemons:
    """Starts the daemons alone, and waits until they serve; of the spec's models nothing is needed yet."""
    prefill_words = [*_on(spec.prefill_device), "--pool-bytes", str(spec.prefill_pool_bytes), *spec.prefill_flags]
    prefills = [_daemon(stack, "prefill", i, spec, prefill_words) for i in range(spec.prefills)]
    addresses = [stack.ready(process) for process, _, _ in prefills]
    peers: list[str] = []
    for (_, name, _), address in zip(prefills, addresses, strict=True):
        peers += ["--peer", f"{name}={address}"]
    decode_words = [*peers, *_on(spec.decode_device), "--pool-bytes", str(spec.decode_pool_bytes), *spec.decode_flags]
    decodes = [_daemon(stack, "decode", i, spec, decode_words) for i in range(spec.decodes)]
    addresses += [stack.ready(process) for process, _, _ in decodes]
    return StartedDaemons(prefills, decodes, addresses)


def _start_workers(
    stack: Stack, spec: SystemSpec, daemons: StartedDaemons
) -> tuple[tuple[Replica, ...], tuple[Replica, ...]]:
    words = [*_computing(spec, spec.prefill_device), *spec.prefill_worker_flags]
    workers = [_worker(stack, "prefill", name, socket, spec, words) for _, name, socket in daemons.prefills]
    words = [*_computing(spec, spec.decode_device), *spec.decode_worker_flags]
    workers += [_worker(stack, "decode", name, socket, spec, words) for _, name, socket in daemons.decodes]
    replicas = [
        Replica(name, process, worker, address, stack.ready(worker), socket)
        for (process, name, socket), worker, address in zip(
            [*daemons.prefills, *daemons.decodes], workers, daemons.addresses, strict=True
        )
    ]
    return tuple(replicas[: spec.prefills]), tuple(replicas[spec.prefills :])


def _daemon(stack: Stack, role: str, index: int, spec: SystemSpec, words: Sequence[str]) -> _Started:
    name = f"{role}-{index}"
    socket = os.path.join(stack.folder, f"{name}.sock")
    common = ["--name", name, "--listen", "127.0.0.1:0", "--socket", socket, "--page-size", str(spec.page_size)]
    return stack.start(name, ["serve", "--role", role, *common, *words]), name, socket


def restart_decode_worker(stack: Stack, spec: SystemSpec, replica: Replica) -> Process:
    """Ends a decode worker and starts another one at its address, beside the daemon that stays."""
    stack.stop(replica.worker)
    words = [*_computing(spec, spec.decode_device), *spec.decode_worker_flags]
    worker = _worker(stack, "decode", replica.name, replica.socket, spec, words, replica.worker_address)
    stack.ready(worker)
    return worker


def _worker(
    stack: Stack,
    role: str,
    name: str,
    socket: str,
    spec: SystemSpec,
    words: Sequence[str],
    listen: str = "127.0.0.1:0",
) -> Process:
    common = ["--socket", socket, "--listen", listen, *_source(spec), *spec.worker_flags]
    return stack.start(f"{name}-worker", ["worker", role, *common, *words])


def _source(spec: SystemSpec) -> list[str]:
    if spec.random_weights:
        return ["--random-weights", spec.random_weights]
    return ["--model", spec.model] if spec.model else ["--synthetic"]


def _on(device: str) -> list[str]:
    """The flags of a daemon for its device."""
    return [] if device == "cpu" else ["--device", device]


def _computing(spec: SystemSpec, device: str) -> list[str]:
    """The flags of a worker for its device."""
    return _on(device.partition(",")[0]) if spec.model or spec.random_weights else []
