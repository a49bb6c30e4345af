"""The set-up of a courier: its configuration, its environment, its slot memory, and a range of ports with one free."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import math
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from kvferry.transfer.courier.messages import MessageError, check_range, check_slots
from kvferry.transfer.courier.network_interfaces import Address, interface_of

HOST_TLS = "tcp"
# Where NIXL sees an NVIDIA GPU it refuses a UCX without GPU memory, whatever is to be written.
HOST_TLS_BESIDE_GPUS = "cuda_copy,tcp"
# cuda_ipc writes over NVLink; without cuda_copy UCX takes no GPU memory at all; notifications go over tcp.
GPU_TLS = "cuda_copy,cuda_ipc,tcp"
PCI_DEVICES = "/sys/bus/pci/devices"
PCI_NVIDIA = 0x10DE
PCI_GPU_CLASSES = (0x0300, 0x0302)
RDMA_DEVICES = "/sys/class/infiniband"
RDMA_TRANSPORTS = ("all", "dc", "ib", "rc", "srd", "ud")  # each with or without _x and the like behind it
# What a courier has of its daemon's environment: what UCX, NIXL, drivers of GPUs and RDMA, Python, the loader and
# sanitizers read. Not the rest, which may name keys or hold what a collector takes as a password.
PASSED_NAMES = frozenset({"GLIBC_TUNABLES", "HOME", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "LD_PRELOAD"})
PASSED_NAMES |= {"PATH", "TEMP", "TMP", "TMPDIR", "TZ", "VIRTUAL_ENV"}
PASSED_NAMES |= {"ASAN_OPTIONS", "LSAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"}
PASSED_PREFIXES = (
    *("UCX_", "NIXL_", "CUDA_", "NVIDIA_", "HIP_", "HSA_", "ROCR_"),
    *("IBV_", "MLX5_", "RDMAV_", "LC_", "MALLOC_", "PYTHON"),
    *("OPENBLAS_", "GOTO_", "OMP_", "MKL_"),
)
# Any of them says how many threads numpy's linear algebra has, which NIXL imports and no courier uses.
BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
ANY_ADDRESS = ("", "*", "0.0.0.0", "::")


class CourierError(RuntimeError):
    """A courier that did not start, or does not end."""


@dataclass(frozen=True, slots=True)
class CourierConfig:
    """One courier. Raises MessageError for a value out of bounds, naming the field.

    `bind_host` chooses the network interfaces that UCX listens on and connects from: the one that owns the address
    (beside it, where `tls` names transports of RDMA, `rdma` of the RDMA ports, by default every one), or all for
    0.0.0.0. `port_range` is inclusive; a courier takes one port of it per interface. `devices`: empty for slots in host
    memory, else the GPU of each rank, by its number in this process; slot i is rank i // (slots / ranks)'s. `tls` is
    UCX_TLS; None: GPU_TLS with devices, else HOST_TLS, or HOST_TLS_BESIDE_GPUS.
    """

    slot_bytes: int
    receive_slots: int
    send_slots: int
    bind_host: str = "127.0.0.1"
    port_range: tuple[int, int] = (21000, 21063)
    tls: str | None = None
    rdma: tuple[str, ...] = ()  # as UCX names them
    tcp_user_timeout_s: float = 3.0  # unacknowledged bytes for so long are an error; also kills a starved peer
    tcp_keepalive_idle_s: float = 1.0
    tcp_keepalive_interval_s: float = 1.0
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_slots(self.slot_bytes, self.receive_slots, self.send_slots, self.devices)
        first, last = self.port_range
        check_range("port_range's first", first, 1, 65535)
        check_range("port_range's last", last, first, 65535)
        if self.tls == "":
            raise MessageError("tls", "empty", "a list of UCX transports")
        for field in ("tcp_user_timeout_s", "tcp_keepalive_idle_s", "tcp_keepalive_interval_s"):
            value: float = getattr(self, field)
            if not 0.001 <= value <= 3600:
                raise MessageError(field, value, "in 0.001..3600")

    @property
    def transports(self) -> str:
        """The value of UCX_TLS."""
        if self.tls is not None:
            return self.tls
        if self.devices:
            return GPU_TLS
        return HOST_TLS_BESIDE_GPUS if nvidia_gpus() else HOST_TLS

    @property
    def memory_bytes(self) -> int:
        return (self.receive_slots + self.send_slots) * self.slot_bytes


def nvidia_gpus(devices: str = PCI_DEVICES) -> int:
    """The number of GPUs as NIXL counts them: by the PCI devices of this machine, whether a driver is there or not."""
    count = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(devices):
            with contextlib.suppress(OSError, ValueError):
                values = []
                for attribute in ("vendor", "class"):
                    with open(os.path.join(devices, name, attribute)) as file:
                        values.append(int(file.read(), 16))
                count += values[0] == PCI_NVIDIA and values[1] >> 8 in PCI_GPU_CLASSES
    return count


def rdma_ports(devices: str = RDMA_DEVICES) -> list[str]:
    """The RDMA ports of this machine as UCX names them, `mlx5_0:1`, whether this process may open them or not."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(devices)):
            with contextlib.suppress(OSError):
                found += [f"{name}:{port}" for port in sorted(os.listdir(os.path.join(devices, name, "ports")))]
    return found


def names_rdma(transports: str) -> bool:
    """Whether UCX would use RDMA devices with this UCX_TLS, where there are any."""
    return any(name.partition("_")[0] in RDMA_TRANSPORTS for name in transports.split(","))


def courier_environment(config: CourierConfig, bind: Address | None, base: Mapping[str, str]) -> dict[str, str]:
    """The courier's environment: what passes of `base`, with our settings of UCX over it. `bind` None means every
    interface. CourierError for RDMA ports that are not there."""
    environment = {
        name: value for name, value in base.items() if name in PASSED_NAMES or name.startswith(PASSED_PREFIXES)
    }
    environment.pop("UCX_NET_DEVICES", None)
    environment |= {
        "UCX_TLS": config.transports,
        "UCX_TCP_PORT_RANGE": f"{config.port_range[0]}-{config.port_range[1]}",
        "UCX_TCP_USER_TIMEOUT": _milliseconds(config.tcp_user_timeout_s),
        "UCX_TCP_KEEPIDLE": _milliseconds(config.tcp_keepalive_idle_s),
        "UCX_TCP_KEEPINTVL": _milliseconds(config.tcp_keepalive_interval_s),
        "PYTHONSAFEPATH": "1",
    }
    if bind is not None:
        devices = _rdma_of(config) if names_rdma(config.transports) else []
        environment["UCX_NET_DEVICES"] = ",".join([interface_of(bind), *devices])
        environment["UCX_TCP_AF_PRIO"] = "inet,inet6" if bind.version == 4 else "inet6,inet"
    environment.setdefault("NIXL_LOG_LEVEL", "WARN")
    if not any(name in environment for name in BLAS_THREADS):
        environment["OPENBLAS_NUM_THREADS"] = "1"  # else one for each core
    home = environment.get("HOME", "")
    if not home or not os.access(home, os.R_OK | os.X_OK):
        environment["HOME"] = "/"  # NIXL dies where it cannot look for $HOME/.nixl.cfg; "/" is root's alone to write
    return environment


def _rdma_of(config: CourierConfig) -> list[str]:
    there = rdma_ports()
    if missing := [name for name in config.rdma if name not in there]:
        raise CourierError(
            f"RDMA ports {', '.join(missing)} are not on this machine; it has {', '.join(there) or 'none'}"
        )
    return list(config.rdma) or there


def _milliseconds(seconds: float) -> str:
    return f"{math.ceil(seconds * 1000)}ms"


def make_slot_memory(nbytes: int) -> int:
    """A memory file of that size, all of it there, that nobody can shrink or grow: neither process can be made to
    fault. Returns its descriptor. Raises CourierError."""
    fd = os.memfd_create("kvferry-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        raise CourierError(f"no memory for {nbytes} bytes of slots: {error.strerror}") from error
    return fd


async def bind_address(bind_host: str) -> Address | None:
    """The address to listen on; None: every interface. Raises CourierError for a name that is none."""
    host = bind_host.strip("[]")
    if host in ANY_ADDRESS:
        return None
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise CourierError(f"bind_host {host!r} cannot be resolved: {error.strerror}") from error
    addresses = [ipaddress.ip_address(str(row[4][0]).partition("%")[0]) for row in found]
    return min(addresses, key=lambda address: address.version)


def check_free_port(bind: Address | None, port_range: tuple[int, int]) -> None:
    """Raises CourierError where no port of the range is free: UCX would try them for ever."""
    family = socket.AF_INET6 if bind is not None and bind.version == 6 else socket.AF_INET
    host = "0.0.0.0" if bind is None else str(bind)
    for port in range(port_range[0], port_range[1] + 1):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return
            except OSError as error:
                if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                    raise CourierError(f"bind_host {host}: {error.strerror}") from error
    raise CourierError(
        f"no port of {port_range[0]} to {port_range[1]} is free on {host}; each courier needs one: widen port_range,"
        " or end what listens there"
    )
