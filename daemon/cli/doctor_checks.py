"""The checks of `kvferry doctor`: each gives findings of one line, with a remedy where something is amiss. Shell.

Nothing is changed and nothing is kept; NIXL's part runs in processes of their own, since it can crash.
"""

from __future__ import annotations

import asyncio
import os
import resource
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvferry.daemon.cli.doctor_peers import peers
from kvferry.daemon.cli.findings import BAD, NOTE, OK, Finding
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.values import ConfigError, check_own_folder, parse_address, size
from kvferry.daemon.memory.capacity import (
    SHM_REMEDY,
    already_in_files,
    existing,
    file_room,
    host_spared,
    host_wanted,
    in_memory,
    in_shm,
    index_lacks,
    lacks_on_gpus,
    shared_memory,
)
from kvferry.daemon.memory.gpu_probe import Driver, DriverError
from kvferry.daemon.peers.handshake import has_way_back
from kvferry.daemon.peers.tls import TlsError, files_of, read_identity, utc
from kvferry.daemon.socket_file import MAX_PATH_BYTES
from kvferry.frames import SUFFIX
from kvferry.listening import cannot_listen, is_loopback
from kvferry.transfer.courier.link import CourierConfig, CourierError, CourierLink
from kvferry.transfer.mapping import memory_room

COURIER_SECONDS = 20.0
PROBE_SLOT_BYTES = 64 << 10
GBIT = 1000
SOON_DAYS = 7


Check = Callable[[DaemonConfig], Iterator[Finding]]


def memory(config: DaemonConfig) -> Iterator[Finding]:
    """Room for the pools, the host tier and the slots, each where it will be."""
    what = f"shared memory {config.shm_dir}"
    if not os.path.isdir(config.shm_dir):
        yield Finding(BAD, what, "is no directory", "mount a tmpfs there, or set --shm-dir")
        return
    text, enough = shared_memory(config)
    if not enough:
        yield Finding(BAD, what, text, SHM_REMEDY)
    elif not os.access(config.shm_dir, os.W_OK):
        yield Finding(BAD, what, "cannot be written to", "run as a user who may, or set --shm-dir")
    else:
        yield Finding(OK, what, text)
    for lack in index_lacks(config):
        found, _, remedy = lack.removeprefix(f"{what}: ").partition(". ")
        yield Finding(NOTE, what, found, remedy)
    slots = _slot_bytes(config) * max(1, len(config.peers))
    room = memory_room.tightest() or memory_room.MemoryRoom("nothing that the system says", sys.maxsize)
    shared, tier, wanted = in_shm(config), in_memory(config), host_wanted(config)
    text = f"{size(room.nbytes)} by {room.name}; slots of {max(1, len(config.peers))} session(s) take {size(slots)}"
    text += f", pools take {size(shared)}" if shared else ""
    text += f", host tier takes {size(tier)} and leaves {size(host_spared(config))} free" if tier else ""
    if room.nbytes < slots + shared:
        yield Finding(BAD, "memory", text, "fewer --slots or smaller --slot-bytes, a smaller pool, or more memory")
    elif room.nbytes < slots + shared + wanted:
        yield Finding(BAD, "memory", text, "a smaller --host-bytes, or a file by --host-dir; or more memory")
    else:
        yield Finding(OK, "memory", text)
    if config.host_dir:
        yield _host_dir(config)


def _slot_bytes(config: DaemonConfig) -> int:
    """Slots of a session: each direction has its own."""
    directions = 2 if has_way_back(config) else 1
    return config.slots * config.slot_bytes * directions


def _host_dir(config: DaemonConfig) -> Finding:
    there = existing(config.host_dir)
    free, wanted = file_room(config)
    what, text = f"host tier {config.host_dir}", f"{size(free)} free on its file system; the files take {size(wanted)}"
    if already := already_in_files(config):
        text += f" more than the {size(already)} of them that are there"
    if not os.access(there, os.W_OK):
        return Finding(BAD, what, f"{there} cannot be written to", "another --host-dir, or its owner's rights")
    if free < wanted:
        return Finding(BAD, what, text, "a smaller --host-bytes, or a larger disk")
    return Finding(OK, what, text)


def limits(config: DaemonConfig) -> Iterator[Finding]:
    """Open files, locked memory, huge pages."""
    need = config.open_files
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"at most {_limit(hard)}; --max-peers {config.max_peers} and --max-workers {config.max_workers} need {need}"
    if hard != resource.RLIM_INFINITY and hard < need:
        yield Finding(BAD, "open files", text, f"ulimit -Hn {need}, LimitNOFILE= of the unit, or fewer peers")
    else:
        yield Finding(OK, "open files", text)
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = _limit(locked) if locked == resource.RLIM_INFINITY else size(locked)
    if locked != resource.RLIM_INFINITY and rdma_devices():
        slots = _slot_bytes(config)
        level = BAD if locked < slots else NOTE
        yield Finding(
            level,
            "memlock",
            text,
            "RDMA locks the slots: ulimit -l unlimited, or LimitMEMLOCK of the container runtime",
        )
    else:
        yield Finding(OK, "memlock", f"{text}; sockets need none")
    yield _huge_pages(config)


def _huge_pages(config: DaemonConfig) -> Finding:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text()
        chosen = text[text.index("[") + 1 : text.index("]")]
    except (OSError, ValueError):
        return Finding(NOTE, "huge pages", "the kernel does not say", "nothing, if copies are fast enough")
    if chosen in ("never", "deny") and config.pool_bytes >= 8 << 30:
        remedy = (
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, or mount the tmpfs with huge=within_size"
        )
        return Finding(NOTE, "huge pages", f"shared memory has {chosen}: large pools cost more TLB misses", remedy)
    return Finding(OK, "huge pages", f"shared memory: {chosen}")


def nixl(config: DaemonConfig) -> Iterator[Finding]:
    """Checks what UCX finds on this machine, and whether a courier starts on the address and ports configured."""
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.daemon.cli.doctor_ucx"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode == 0:
        found = done.stdout.split()
        yield Finding(OK, "UCX transports", " ".join(found))
        if "tcp" not in found:
            yield Finding(BAD, "UCX transports", "no tcp", "the network of this host or container is missing")
        if rdma_devices() and "ib" not in found:
            remedy = "give the container /dev/infiniband and the rdma-core libraries"
            yield Finding(NOTE, "UCX transports", "RDMA devices are here, but UCX has none", remedy)
    else:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        yield Finding(BAD, "UCX transports", last, "pip install kvferry-nixl (or nixl), for this Python")
        return
    began = time.monotonic()
    try:
        asyncio.run(_courier(config))
    except (CourierError, ValueError, OSError) as error:
        yield Finding(BAD, "courier", str(error), "the message names what is missing; see --listen and --ucx-ports")
    else:
        ports = "-".join(map(str, config.ucx_ports))
        host = parse_address(config.listen)[0]
        yield Finding(OK, "courier", f"starts on {host}, ports {ports}, in {time.monotonic() - began:.1f} s")


async def _courier(config: DaemonConfig) -> None:
    probe = CourierConfig(
        slot_bytes=PROBE_SLOT_BYTES,
        receive_slots=1,
        send_slots=0,
        bind_host=parse_address(config.listen)[0],
        port_range=config.ucx_ports,
        tls=config.ucx_tls or None,
        rdma=config.rdma,
    )
    link = await CourierLink.start(probe, lambda event: None, COURIER_SECONDS)
    await link.stop(COURIER_SECONDS)


def rdma_devices() -> list[str]:
    try:
        return sorted(os.listdir("/sys/class/infiniband"))
    except OSError:
        return []


def network(config: DaemonConfig) -> Iterator[Finding]:
    """The port of --listen, and the interfaces that couriers may use."""
    host, port = parse_address(config.listen)
    if port and (problem := cannot_listen(host, port)):
        remedy = f"another daemon may run here (kvferry health {config.listen}); else another --listen"
        yield Finding(NOTE, f"--listen {config.listen}", problem, remedy)
    if is_loopback(host):
        yield Finding(OK, "network", f"--listen is {config.listen}: peers must be on this machine")
        return
    for interface in sorted(Path("/sys/class/net").iterdir()):
        if interface.name == "lo" or _read(interface / "operstate") not in ("up", "unknown"):
            continue
        speed, mtu = _read(interface / "speed"), _read(interface / "mtu")
        known = speed.isdigit() and int(speed) > 0
        text = f"MTU {mtu}" + (f", {int(speed) / GBIT:g} Gbit/s" if known else ", speed unknown")
        slow = known and int(speed) < 10 * GBIT
        remedy = "a page of KV is hundreds of KiB: 25 Gbit/s or more is what disaggregation wants" if slow else ""
        yield Finding(NOTE if slow else OK, f"interface {interface.name}", text, remedy)
    for device in rdma_devices():
        yield Finding(OK, f"RDMA device {device}", _read(Path("/sys/class/infiniband") / device / "fw_ver") or "here")


def gpus(config: DaemonConfig) -> Iterator[Finding]:
    """Driver, devices, peer access, memory that processes share, the driver's batch copy."""
    try:
        driver = Driver()
    except DriverError as error:
        if config.devices:
            remedy = "a machine or a container with NVIDIA's driver, or --device cpu"
            yield Finding(BAD, "GPU", f"none ({error}), and --device is {config.device}", remedy)
        else:
            yield Finding(OK, "GPU", f"none ({error}): pools lie in host memory")
        return
    try:
        yield from _devices(driver)
        for lack in lacks_on_gpus(config, driver):
            yield Finding(BAD, "GPU memory", lack, "a smaller --pool-bytes, or another --device")
    except DriverError as error:
        yield Finding(BAD, "GPU", str(error), "nvidia-smi, and the kernel's log, say what is wrong with the driver")


def _devices(driver: Driver) -> Iterator[Finding]:
    version, count = driver.version(), driver.count()
    text = f"CUDA {version // 1000}.{version % 1000 // 10}"
    if version >= 12080:
        yield Finding(OK, "driver's batch copy", f"{text}: cuMemcpyBatchAsync is there")
    else:
        yield Finding(
            NOTE, "driver's batch copy", f"{text} has none: copies are loops", "a driver of CUDA 12.8 or later"
        )
    for device in range(count):
        shares = driver.shares_memory(device)
        remedy = "" if shares else "a device without MIG or vGPU; in a container --ipc=host and the same PID namespace"
        text = "its memory can be shared by CUDA IPC" if shares else "its memory cannot be shared by CUDA IPC"
        yield Finding(OK if shares else BAD, f"GPU {device} {driver.name(device)}", text, remedy)
    lonely = [f"{a}-{b}" for a in range(count) for b in range(count) if a < b and not driver.peers(a, b)]
    if lonely:
        remedy = "copies between them go through the host: NVLink, or PCIe ACS off (lspci -vvv, iommu=pt)"
        yield Finding(NOTE, "GPU peer access", f"none between {', '.join(lonely)}", remedy)
    elif count > 1:
        yield Finding(OK, "GPU peer access", f"between all {count}")


def certificate(config: DaemonConfig) -> Iterator[Finding]:
    """Whether the files of TLS fit together, and until when."""
    if (files := files_of(config)) is None:
        if not is_loopback(parse_address(config.listen)[0]):
            remedy = "--tls-cert, --tls-key, --tls-ca and --tls-peer; and a network policy, for NIXL stays as it is"
            yield Finding(NOTE, "TLS", f"off, and --listen is {config.listen}: sessions are not encrypted", remedy)
        return
    now = time.time()
    try:
        identity = read_identity(files, now)
    except TlsError as error:
        yield Finding(BAD, "TLS", str(error), "issue it again: three files in PEM, the key without a passphrase")
        return
    days = (identity.expires - now) / 86400
    text = f"{', '.join(identity.names) or 'no alternative names'}; until {utc(identity.expires)}, {days:.0f} days"
    if days < SOON_DAYS:
        yield Finding(NOTE, "TLS", text, f"renew {files.cert} in place; the daemon need not be restarted")
    elif not identity.names:
        yield Finding(BAD, "TLS", text, "peers know a certificate by its subjectAltName: DNS, URI or IP")
    elif os.stat(files.key).st_mode & 0o007:
        yield Finding(BAD, "TLS", f"{files.key} may be read by every user", f"chmod o-rwx {files.key}")
    else:
        yield Finding(OK, "TLS", text)


def daemon_socket(config: DaemonConfig) -> Iterator[Finding]:
    """The workers' socket: its folder, and who is there already."""
    what = f"socket {config.socket}"
    if len(config.socket.encode()) > MAX_PATH_BYTES:
        remedy = f"it may have at most {MAX_PATH_BYTES}: a shorter --socket"
        yield Finding(BAD, what, f"{len(config.socket.encode())} bytes", remedy)
        return
    try:
        check_own_folder(os.path.dirname(config.socket))
    except ConfigError as error:
        yield Finding(BAD, what, "another user may have made its folder", str(error))
        return
    folder = existing(os.path.dirname(config.socket))
    modes = {path: _mode(path) for path in (config.socket, config.socket + SUFFIX)}
    there = {path: mode for path, mode in modes.items() if mode is not None}
    if others := [path for path, mode in there.items() if not stat.S_ISSOCK(mode)]:
        yield Finding(BAD, f"socket {others[0]}", "exists and is no socket", "another --socket, or remove it")
    elif there:
        yield Finding(
            NOTE,
            what,
            "is there: a daemon runs, or died",
            f"kvferry health unix:{config.socket} says which; a start clears it",
        )
    elif not os.path.isdir(folder):
        yield Finding(BAD, what, f"{folder} is no folder", "another --socket, or XDG_RUNTIME_DIR")
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield Finding(BAD, what, f"{folder} cannot be written to", "another --socket, or XDG_RUNTIME_DIR")
    else:
        yield Finding(OK, what, "free")


CHECKS: tuple[Check, ...] = (memory, limits, daemon_socket, nixl, network, gpus, certificate, peers)


def _mode(path: str) -> int | None:
    """None where nothing can be seen there."""
    try:
        return os.stat(path).st_mode
    except OSError:
        return None


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the speed of an interface that is down cannot be read
        return ""
