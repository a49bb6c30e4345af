"""What `kvferry doctor` looks at: each check gives findings of one line, with a remedy where something is amiss. Shell.

Nothing is changed and nothing is kept; NIXL's part runs in processes of their own, since it can crash.
"""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvferry.channels import ChannelError, ClientTls, open_channel
from kvferry.daemon.config import DaemonConfig
from kvferry.daemon.config_sources import shown
from kvferry.daemon.doctor_gpu import Driver, DriverError
from kvferry.daemon.handshake import PROTOCOL, PROTOCOL_MIN
from kvferry.daemon.stats_main import fetch, size
from kvferry.daemon.tls import TlsError, files_of, read_identity, utc
from kvferry.daemon.values import is_loopback, parse_address
from kvferry.proto import common_pb2 as common
from kvferry.transfer.courier_link import CourierConfig, CourierError, CourierLink

OK, NOTE, BAD = "ok", "note", "bad"
COURIER_SECONDS = 20.0
PROBE_SLOT_BYTES = 64 << 10
CONNECT_SECONDS = 3.0
GBIT = 1000
SOON_DAYS = 7


@dataclass(frozen=True, slots=True)
class Finding:
    """`level` bad: a daemon with these settings will not start, or not work; note: it could be better."""

    level: str
    what: str
    found: str
    remedy: str = ""


Check = Callable[[DaemonConfig], Iterator[Finding]]


def memory(config: DaemonConfig) -> Iterator[Finding]:
    """Room for the pools, the host tier and the slots, each where it will be."""
    pools = config.pool_bytes * len(config.roles) if config.pool == "daemon" else 0
    host = config.host_bytes * len(config.roles)
    in_shm = pools + (0 if config.host_dir else host)
    what = f"shared memory {config.shm_dir}"
    if not os.path.isdir(config.shm_dir):
        yield Finding(BAD, what, "is no directory", "mount a tmpfs there, or set --shm-dir")
        return
    free = shutil.disk_usage(config.shm_dir).free
    text = f"{size(free)} free; pools{'' if config.host_dir or not host else ' and host tier'} take {size(in_shm)}"
    if free < in_shm:
        remedy = (
            "a smaller --pool-bytes or --host-bytes, or more: mount -o remount,size=...; in a container --shm-size, "
        )
        yield Finding(BAD, what, text, remedy + "or a memory-backed emptyDir with a sizeLimit")
    elif not os.access(config.shm_dir, os.W_OK):
        yield Finding(BAD, what, "cannot be written to", "run as a user who may, or set --shm-dir")
    else:
        yield Finding(OK, what, text)
    slots = config.slots * config.slot_bytes * max(1, len(config.peers))
    available = _meminfo("MemAvailable")
    text = f"{size(available)} available; slots of {max(1, len(config.peers))} session(s) take {size(slots)}"
    if available < slots + in_shm:
        yield Finding(BAD, "memory", text, "fewer --slots or smaller --slot-bytes, a smaller pool, or more memory")
    else:
        yield Finding(OK, "memory", text)
    if config.host_dir:
        yield _host_dir(config, host)


def _host_dir(config: DaemonConfig, needed: int) -> Finding:
    folder = Path(config.host_dir)
    existing = _existing(folder.absolute())
    free = shutil.disk_usage(existing).free
    what, text = f"host tier {folder}", f"{size(free)} free on its file system; the files take {size(needed)}"
    if not os.access(existing, os.W_OK):
        return Finding(BAD, what, f"{existing} cannot be written to", "another --host-dir, or its owner's rights")
    if free < needed:
        return Finding(BAD, what, text, "a smaller --host-bytes, or a larger disk")
    return Finding(OK, what, text)


def limits(config: DaemonConfig) -> Iterator[Finding]:
    """Open files, locked memory, huge pages."""
    need = 128 + 16 * config.max_peers + 4 * config.max_workers
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"at most {_limit(hard)}; --max-peers {config.max_peers} and --max-workers {config.max_workers} need {need}"
    if hard != resource.RLIM_INFINITY and hard < need:
        yield Finding(BAD, "open files", text, f"ulimit -Hn {need}, LimitNOFILE= of the unit, or fewer peers")
    else:
        yield Finding(OK, "open files", text)
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    text = _limit(locked) if locked == resource.RLIM_INFINITY else size(locked)
    if locked != resource.RLIM_INFINITY and rdma_devices():
        slots = config.slots * config.slot_bytes
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
    """What UCX finds on this machine, and whether a courier starts on the address and ports configured."""
    done = subprocess.run(
        [sys.executable, "-m", "kvferry.daemon.doctor_ucx"], capture_output=True, text=True, timeout=60, check=False
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
        yield Finding(BAD, "UCX transports", last, "pip install nixl, for this Python")
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
        remedy = "another daemon may run here (kvferry health); else another --listen"
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


def cannot_listen(host: str, port: int) -> str:
    """Why nothing can listen there now; empty where something can."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(found[0][4])
            probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def gpus(config: DaemonConfig) -> Iterator[Finding]:
    """Driver, devices, peer access, memory that processes share, the driver's batch copy."""
    try:
        driver = Driver()
    except DriverError as error:
        yield Finding(OK, "GPU", f"none ({error}): pools lie in host memory")
        return
    try:
        yield from _devices(driver)
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


def peers(config: DaemonConfig) -> Iterator[Finding]:
    """Whether each prefill daemon is reached, and speaks the protocol that a session needs."""
    for name, address in config.peers.items():
        yield _peer(config, f"peer {name} {address}", address)


def _peer(config: DaemonConfig, what: str, address: str) -> Finding:
    host, port = parse_address(address)
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS):
            pass
    except OSError as error:
        remedy = "is it started, with --listen on an address that this node reaches? firewall, network policy, DNS?"
        return Finding(BAD, what, f"cannot be reached: {error.strerror or error}", remedy)
    try:
        with open_channel(address, _client_tls(config)) as channel:
            stats = fetch(channel)
    except ChannelError as error:
        return Finding(BAD, what, str(error), "see TLS above")
    except grpc.RpcError as error:
        if config.tls_cert:
            remedy = _tls_remedy(config, host, port)
            return Finding(BAD, what, f"{error.code().name}: {error.details()}", remedy)
        remedy = "is that port a kvferry daemon's --listen (not its metrics or a worker)?"
        return Finding(BAD, what, f"{error.code().name}: {error.details()}", remedy)
    protocol = stats.build.protocol
    if not PROTOCOL_MIN <= protocol <= PROTOCOL:
        text = f"speaks protocol {protocol}, this release {PROTOCOL_MIN} to {PROTOCOL}"
        return Finding(BAD, what, text, "install releases of kvferry at most one protocol apart")
    side = next((side for side in stats.sides if side.role == common.ROLE_PREFILL), None)
    if side is None:
        return Finding(BAD, what, "is no prefill daemon", "check --peer here and --role there")
    if not side.pool.pages:
        return Finding(NOTE, what, "has no worker yet, so its model is not known", "start its prefill worker")
    pages = shown("page_bytes", side.pool.page_bytes)
    text = f"{stats.daemon}, kvferry {stats.build.version}, protocol {protocol}, pages of {pages}"
    return Finding(OK, what, text)


def _client_tls(config: DaemonConfig) -> ClientTls | None:
    return ClientTls(config.tls_ca, config.tls_cert, config.tls_key) if config.tls_cert else None


def _tls_remedy(config: DaemonConfig, host: str, port: int) -> str:
    """What a handshake says that gRPC's own message does not."""
    try:
        context = ssl.create_default_context(cafile=config.tls_ca)
        context.load_cert_chain(config.tls_cert, config.tls_key)
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, port), CONNECT_SECONDS) as plain,
            context.wrap_socket(plain, server_hostname=host) as secured,
        ):
            # In TLS 1.3 a client's certificate is judged after its handshake; gRPC then closes without a word.
            if not secured.recv(1):
                return "it does not believe this daemon's certificate: is its authority in --tls-ca there?"
    except ssl.SSLCertVerificationError as error:
        return f"its certificate is not believed here: {error.verify_message}"
    except ssl.SSLError as error:
        return f"the handshake fails ({error.reason or error}): does it have TLS?"
    except OSError as error:
        return f"the handshake breaks off ({error}): does it have TLS?"
    return "the handshake is fine: is that port a kvferry daemon's --listen?"


def daemon_socket(config: DaemonConfig) -> Iterator[Finding]:
    """The workers' socket: its folder, and who is there already."""
    what = f"socket {config.socket}"
    if len(config.socket.encode()) > 107:
        remedy = "Unix sockets take at most 107: a shorter --socket"
        yield Finding(BAD, what, f"{len(config.socket.encode())} bytes", remedy)
        return
    existing = _existing(Path(config.socket).absolute().parent)
    if (mode := _mode(config.socket)) is not None:
        if not stat.S_ISSOCK(mode):
            yield Finding(BAD, what, "exists and is no socket", "another --socket, or remove it")
        else:
            yield Finding(
                NOTE, what, "is there: a daemon runs, or died", "kvferry health says which; a start clears it"
            )
    elif not os.path.isdir(existing):
        yield Finding(BAD, what, f"{existing} is no folder", "another --socket, or XDG_RUNTIME_DIR")
    elif not os.access(existing, os.W_OK | os.X_OK):
        yield Finding(BAD, what, f"{existing} cannot be written to", "another --socket, or XDG_RUNTIME_DIR")
    else:
        yield Finding(OK, what, "free")


CHECKS: tuple[Check, ...] = (memory, limits, daemon_socket, nixl, network, gpus, certificate, peers)


def _existing(path: Path) -> Path:
    """It, or the nearest of its parents that can be seen. (Path.exists raises where a folder above may not be read.)"""
    return next(parent for parent in (path, *path.parents) if os.path.exists(parent))


def _mode(path: str) -> int | None:
    """None where nothing can be seen there."""
    try:
        return os.stat(path).st_mode
    except OSError:
        return None


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the speed of an interface that is down cannot be read
        return ""
