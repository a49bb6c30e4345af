"""What `kvferry serve` is told. Sizes are bytes, times seconds."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import tempfile
from dataclasses import dataclass, field

from kvferry.daemon.admission import OVERTAKES
from kvferry.daemon.namespaces import Quota
from kvferry.proto.limits import MAX_MESSAGE_BYTES, MAX_NAME_CHARS
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.policy import policy_names
from kvferry.transfer.courier_messages import MAX_SLOTS
from kvferry.transfer.lanes import MAX_RANKS
from kvferry.transfer.layouts import StorageOrder

STORAGES = {
    "page": StorageOrder.PAGE_MAJOR,
    "layer": StorageOrder.LAYER_MAJOR,
    "layer-blocks": StorageOrder.LAYER_BLOCKS,
}

_SIZE = re.compile(r"^\s*(\d+)\s*([KMGT]i?B|B)?\s*$", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}


class ConfigError(ValueError):
    """A setting that cannot be, named."""


def parse_size(text: str) -> int:
    """Bytes of "4096", "64MiB", "8GiB", "2GB". Raises ConfigError."""
    found = _SIZE.match(text)
    if found is None:
        raise ConfigError(f"size {text!r} is not a number of bytes, like 4096, 64MiB or 8GiB")
    return int(found.group(1)) * _UNITS[(found.group(2) or "").upper()]


def parse_device(text: str) -> tuple[int, ...]:
    """`cpu`: (); `cuda:0,cuda:1`: (0, 1). ConfigError."""
    if text == "cpu":
        return ()
    found = [re.fullmatch(r"cuda:(\d{1,2})", part.strip()) for part in text.split(",")]
    if not all(found):
        raise ConfigError(f"device is {text[:64]!r}; it must be cpu, or cuda:I for each rank with commas between")
    devices = tuple(int(match.group(1)) for match in found if match is not None)
    if len(set(devices)) != len(devices):
        raise ConfigError(f"device is {text[:64]!r}; it names a GPU twice")
    return devices


def parse_address(text: str) -> tuple[str, int]:
    """(host, port) of "host:port" or "[v6]:port". Raises ConfigError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError(f"address {text!r} is not HOST:PORT with a port of 0 to 65535")
    return host.strip("[]"), int(port)


def parse_quota(text: str) -> tuple[str, Quota]:
    """(namespace, quota) of "NAMESPACE=SOFT:HARD" or "NAMESPACE=SOFT:HARD:HOST_SOFT:HOST_HARD", in pages. Raises
    ConfigError.
    """
    namespace, equals, numbers = text.partition("=")
    parts = numbers.split(":")
    if not equals or len(parts) not in (2, 4) or not all(part.isdigit() and len(part) <= 12 for part in parts):
        raise ConfigError(f"quota {text!r} is not NAMESPACE=SOFT:HARD[:HOST_SOFT:HOST_HARD] with numbers of pages")
    try:
        return namespace.lower(), Quota(*map(int, parts))
    except ValueError as error:
        raise ConfigError(f"quota {text!r}: {error}") from error


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def runtime_dir() -> str:
    """Where sockets lie unless told otherwise: XDG_RUNTIME_DIR, else the temporary folder."""
    return os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()


@dataclass(frozen=True, slots=True)
class DaemonConfig:
    roles: tuple[str, ...]  # "decode", "prefill"
    name: str
    listen: str  # HOST:PORT of peers, statistics, look-ups; port 0: any free one
    socket: str  # Unix socket of the workers
    peers: dict[str, str] = field(default_factory=dict)  # prefill daemon's name -> HOST:PORT
    pool_bytes: int = 1 << 30  # of each role's pool, over all ranks
    page_size: int = 64  # tokens
    shm_dir: str = "/dev/shm"
    ranks: int = 1  # tensor-parallel: each has a pool of its own, of its heads of every page
    storage: str = "page"  # how a rank's pool is laid out: "page", "layer" or "layer-blocks"
    device: str = "cpu"  # where the pool is: "cpu", or "cuda:I" for each rank, with commas between
    slots: int = 16  # receive slots of a session and rank, and sending slots of one
    slot_bytes: int = 8 << 20
    max_tokens: int = 1 << 20  # of a request
    queue: int = 1024  # requests waiting for admission, or in the rendezvous table
    max_peers: int = 64
    max_workers: int = 64
    admission_seconds: float = 30.0
    transfer_seconds: float = 60.0
    heartbeat_seconds: float = 0.5
    peer_lost_seconds: float = 3.0
    grace_seconds: float = 30.0
    stalled_seconds: float = 10.0  # without progress of some part, behind which the daemon is not healthy
    orphaned_share: float = 0.5  # of a pool, that may wait for lost workers' proven ends before requests are refused
    copy_threads: int = 1
    reuse: str = "on"
    host_bytes: int = 0  # of each role's host tier; 0: none
    host_dir: str = ""  # where the host tier survives the daemon; "": it does not
    checksums: str = "off"  # "on": of every spilled page, verified at every restore
    policy: str = "lru"  # of eviction
    evict_output_first: bool = False
    write_through_hits: int = 0  # hits after which a node is copied to the host before it is evicted; 0: never
    quotas: dict[str, Quota] = field(default_factory=dict)  # by namespace id (hex), or "default"
    overcommit: float = 1.0
    overtakes: int = OVERTAKES
    insecure: bool = False
    reflection: bool = False
    ucx_ports: tuple[int, int] = (21000, 21063)

    @property
    def devices(self) -> tuple[int, ...]:
        """The GPU of each rank; () on the CPU. ConfigError."""
        return parse_device(self.device)

    def __post_init__(self) -> None:
        host, _ = parse_address(self.listen)
        if not is_loopback(host) and not self.insecure:
            raise ConfigError(
                f"listen is {self.listen}: sessions are not encrypted; an address that is not loopback needs --insecure"
            )
        for peer, address in self.peers.items():
            _check_name("peers", peer)
            parse_address(address)
        _check_name("name", self.name)
        if not self.roles or any(role not in ("decode", "prefill") for role in self.roles):
            raise ConfigError(f"roles is {self.roles}; each must be decode or prefill")
        if self.reuse not in ("on", "off"):
            raise ConfigError(f"reuse is {self.reuse!r}; it must be on or off")
        bounds = (
            ("pool_bytes", self.pool_bytes, 1, 1 << 48),
            ("page_size", self.page_size, 1, 4096),
            ("ranks", self.ranks, 1, MAX_RANKS),
            ("slots", self.slots, 1, 1024),
            ("slot_bytes", self.slot_bytes, 4096, 1 << 29),
            ("max_tokens", self.max_tokens, 1, 1 << 24),
            ("queue", self.queue, 1, 1 << 16),
            ("max_peers", self.max_peers, 1, 1024),
            ("max_workers", self.max_workers, 1, 1024),
            ("copy_threads", self.copy_threads, 1, 64),
            ("host_bytes", self.host_bytes, 0, 1 << 48),
            ("write_through_hits", self.write_through_hits, 0, 1 << 20),
            ("overtakes", self.overtakes, 0, 1 << 16),
        )
        for name, value, low, high in bounds:
            if not low <= value <= high:
                raise ConfigError(f"{name} is {value}; it must be {low} to {high}")
        if self.devices and self.ranks != len(self.devices):
            raise ConfigError(f"device is {self.device!r}, of {len(self.devices)} ranks; ranks is {self.ranks}")
        if self.storage not in STORAGES:
            raise ConfigError(f"storage is {self.storage!r}; it must be one of {', '.join(STORAGES)}")
        if self.slots * self.ranks > MAX_SLOTS:
            raise ConfigError(
                f"slots is {self.slots} of each of {self.ranks} ranks; together they must be {MAX_SLOTS} at most"
            )
        if self.checksums not in ("on", "off"):
            raise ConfigError(f"checksums is {self.checksums!r}; it must be on or off")
        if self.policy not in policy_names():
            raise ConfigError(f"policy is {self.policy!r}; it must be one of {', '.join(policy_names())}")
        if not 1.0 <= self.overcommit <= 100.0:
            raise ConfigError(f"overcommit is {self.overcommit}; it must be 1 to 100")
        if self.host_dir and not self.host_bytes:
            raise ConfigError(f"host_dir is {self.host_dir!r}, but host_bytes is 0: there is no host tier to keep")
        for namespace in self.quotas:
            if namespace != "default" and not re.fullmatch("[0-9a-f]{64}", namespace):
                raise ConfigError(
                    f"quotas: {namespace!r} must be 64 hexadecimal digits (see kvferry stats --format json), or default"
                )
        if not 0.0 <= self.orphaned_share <= 1.0:
            raise ConfigError(f"orphaned_share is {self.orphaned_share}; it must be 0 to 1")
        times = ("admission_seconds", "transfer_seconds", "heartbeat_seconds", "peer_lost_seconds", "grace_seconds")
        for name in (*times, "stalled_seconds"):
            seconds: float = getattr(self, name)
            if not 0.05 <= seconds <= 3600:
                raise ConfigError(f"{name} is {seconds}; it must be 0.05 to 3600")
        digests = self.max_tokens // self.page_size * DIGEST_BYTES
        if digests + 65536 > MAX_MESSAGE_BYTES:
            raise ConfigError(
                f"max_tokens is {self.max_tokens}: at page size {self.page_size} its digests are {digests} bytes; "
                f"a message takes {MAX_MESSAGE_BYTES}"
            )
        first, last = self.ucx_ports
        if last - first + 1 < len(self.peers):
            raise ConfigError(f"ucx_ports {first}-{last} are fewer than the {len(self.peers)} peers; each takes one")
        if len(self.peers) > self.max_peers:
            raise ConfigError(f"peers names {len(self.peers)}; max_peers is {self.max_peers}")


def _check_name(field_name: str, name: str) -> None:
    if not re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9_.-]{{0,{MAX_NAME_CHARS - 1}}}", name):
        raise ConfigError(
            f"{field_name}: {name!r} must be 1 to {MAX_NAME_CHARS} letters, digits, '_', '.' or '-', "
            "the first a letter or digit"
        )


def new_incarnation() -> bytes:
    """16 random bytes that name this process."""
    return secrets.token_bytes(16)
