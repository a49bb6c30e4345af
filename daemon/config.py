"""What `kvferry serve` is told: one model of all settings, their defaults, bounds and meanings. The flags, the keys of
the YAML file, the KVFERRY_* variables, `kvferry config` and the JSON schema are made from it. Sizes are bytes, times
seconds.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from kvferry.daemon.admission import OVERTAKES
from kvferry.daemon.namespaces import Quota
from kvferry.daemon.tls_names import check_tls, parse_tls_peers
from kvferry.daemon.values import (
    ConfigError,
    is_loopback,
    is_name,
    parse_address,
    parse_device,
    parse_size,
    runtime_dir,
)
from kvferry.proto.limits import MAX_MESSAGE_BYTES, MAX_NAME_CHARS
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.radix.policy import policy_names
from kvferry.transfer.courier_config import names_rdma
from kvferry.transfer.courier_messages import MAX_SLOTS
from kvferry.transfer.geometry import StorageOrder
from kvferry.transfer.lanes import MAX_RANKS

STORAGES = {
    "page": StorageOrder.PAGE_MAJOR,
    "layer": StorageOrder.LAYER_MAJOR,
    "layer-blocks": StorageOrder.LAYER_BLOCKS,
}

MAX_TRANSPORTS = 16


def parse_quota(text: str) -> tuple[str, Quota]:
    """(namespace, quota) of "NAMESPACE=SOFT:HARD" or "NAMESPACE=SOFT:HARD:HOST_SOFT:HOST_HARD", in pages. Raises
    ConfigError.
    """
    namespace, _, numbers = text.partition("=")
    parts = numbers.split(":")
    if len(parts) not in (2, 4) or not all(part.isdigit() and len(part) <= 12 for part in parts):
        raise ConfigError(f"quota {text!r} is not NAMESPACE=SOFT:HARD[:HOST_SOFT:HOST_HARD] with numbers of pages")
    try:
        return namespace.lower(), Quota(*map(int, parts))
    except ValueError as error:
        raise ConfigError(f"quota {text!r}: {error}") from error


# -- kinds of values: each takes what a flag, a variable or the YAML file says ----------------------------------------


def _size(value: object) -> object:
    return parse_size(value) if isinstance(value, str) else value


def _address(value: str) -> str:
    if value:
        parse_address(value)
    return value


def _endpoint(value: str) -> str:
    if value:
        scheme, separator, address = value.partition("://")
        if scheme != "tcp" or not separator:
            raise ConfigError(f"endpoint {value!r} is not tcp://HOST:PORT")
        parse_address(address)
    return value


def _name(value: str) -> str:
    if not is_name(value):
        raise ConfigError(
            f"name {value!r} must be 1 to {MAX_NAME_CHARS} letters, digits, '_', '.' or '-', "
            "the first a letter or digit"
        )
    return value


def _entries(value: object, what: str) -> dict[str, str]:
    """Of a mapping, or of NAME=VALUE in a list or separated by commas."""
    if isinstance(value, dict):
        return {str(name): str(of) for name, of in value.items()}
    found: dict[str, str] = {}
    for entry in value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]:
        name, equals, of = str(entry).strip().partition("=")
        if not equals or name in found:
            raise ConfigError(f"{what} {str(entry)!r} is not {_FORMS[what]}, or names {name!r} twice")
        found[name] = of
    return found


_FORMS = {"peer": "NAME=HOST:PORT", "quota": "NAMESPACE=SOFT:HARD[:HOST_SOFT:HOST_HARD]"}


def _peers(value: object) -> dict[str, str]:
    peers = _entries(value, "peer")
    for name, address in peers.items():
        _name(name)
        parse_address(address)
    return peers


def _quotas(value: object) -> dict[str, Quota]:
    if isinstance(value, dict) and all(isinstance(quota, Quota) for quota in value.values()):
        return value
    quotas = dict(parse_quota(f"{name}={numbers}") for name, numbers in _entries(value, "quota").items())
    for namespace in quotas:
        if namespace != "default" and not re.fullmatch("[0-9a-f]{64}", namespace):
            raise ConfigError(
                f"namespace {namespace!r} must be 64 hexadecimal digits (see kvferry stats --format json), or default"
            )
    return quotas


def _ports(value: object) -> object:
    """(first, last) of "FIRST-LAST"."""
    if not isinstance(value, str):
        return value
    first, _, last = value.partition("-")
    if not (first.isdigit() and last.isdigit() and 1024 <= int(first) <= int(last) <= 65535):
        raise ConfigError(f"ports {value!r} are not FIRST-LAST within 1024-65535")
    return int(first), int(last)


def _transports(value: str) -> str:
    """UCX's names with commas between; empty: the courier's own choice."""
    names = value.split(",") if value else []
    if len(names) > MAX_TRANSPORTS or not all(re.fullmatch("[a-z0-9_]{1,32}", name) for name in names):
        raise ConfigError(
            f"transports {value[:64]!r} must be 1 to {MAX_TRANSPORTS} names with commas between, each of 1 to 32 of "
            "a-z, 0-9 and '_', like rc,cuda_copy,cuda_ipc,tcp"
        )
    return value


def _device(value: str) -> str:
    parse_device(value)
    return value


def _policy(value: str) -> str:
    if value not in policy_names():
        raise ConfigError(f"policy {value!r} must be one of {', '.join(policy_names())}")
    return value


def _schema(**schema: Any) -> WithJsonSchema:
    return WithJsonSchema(schema)


_SIZE_FORM = r"^[0-9]+ *([kKmMgGtT][iI]?[bB]|[bB])?$"
Size = Annotated[
    int,
    BeforeValidator(_size),
    _schema(anyOf=[{"type": "integer", "minimum": 0}, {"type": "string", "pattern": _SIZE_FORM}]),
]
Seconds = Annotated[float, Field(ge=0.05, le=3600, allow_inf_nan=False)]
Address = Annotated[str, AfterValidator(_address)]
Endpoint = Annotated[str, AfterValidator(_endpoint)]
Name = Annotated[str, AfterValidator(_name)]
Peers = Annotated[
    dict[str, str], BeforeValidator(_peers), _schema(type="object", additionalProperties={"type": "string"})
]
Quotas = Annotated[
    dict[str, Quota],
    BeforeValidator(_quotas),
    _schema(type="object", additionalProperties={"type": "string", "pattern": "^[0-9]+:[0-9]+(:[0-9]+:[0-9]+)?$"}),
]
Ports = Annotated[tuple[int, int], BeforeValidator(_ports), _schema(type="string", pattern="^[0-9]+-[0-9]+$")]
Transports = Annotated[
    str, AfterValidator(_transports), _schema(type="string", pattern="^([a-z0-9_]{1,32}(,[a-z0-9_]{1,32})*)?$")
]
TlsPeers = Annotated[
    tuple[str, ...],
    BeforeValidator(parse_tls_peers),
    _schema(anyOf=[{"type": "array", "items": {"type": "string"}}, {"type": "string"}]),
]
Device = Annotated[
    str, AfterValidator(_device), _schema(type="string", pattern="^(cpu|cuda:[0-9]{1,2}(, *cuda:[0-9]{1,2})*)$")
]
Policy = Annotated[str, AfterValidator(_policy), _schema(type="string", enum=list(policy_names()))]
Choice = Literal["on", "off"]


@dataclass(frozen=True, slots=True)
class Flag:
    """How a setting's flag differs from the setting: what stands for its value, a name of its own if it may be
    repeated, and its default in words where it follows from other settings.
    """

    metavar: str = ""
    repeated: str = ""
    default: str = ""


def flag_of(name: str) -> str:
    """The flag of a setting."""
    for meta in DaemonConfig.model_fields[name].metadata:
        if isinstance(meta, Flag) and meta.repeated:
            return meta.repeated
    return "--" + name.replace("_", "-")


# -- the model -------------------------------------------------------------------------------------------------------

PORTS = {"decode": 7070, "prefill": 7071, "both": 7070}
METRICS_PORTS = {"decode": 9470, "prefill": 9471, "both": 9470}


def _default_metrics(data: dict[str, Any]) -> str:
    """On loopback whatever --listen says. Beside an address with any free port, any free port, too."""
    return f"127.0.0.1:{METRICS_PORTS[data['role']] if parse_address(data['listen'])[1] else 0}"


def _metrics(value: object) -> object:
    return "" if value == "off" else value


class DaemonConfig(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", title="kvferry serve")

    role: Annotated[Literal["decode", "prefill", "both"], Field(description="which end of transfers this daemon is")]
    name: Annotated[
        Name, Field(description="by which front ends and peers know this daemon"), Flag("NAME", default="the role")
    ] = Field(default_factory=lambda data: data["role"])
    listen: Annotated[
        Address,
        Field(description="for peers, statistics and look-ups; port 0: any free one"),
        Flag("HOST:PORT", default="127.0.0.1:7070, of a prefill daemon 127.0.0.1:7071"),
    ] = Field(default_factory=lambda data: f"127.0.0.1:{PORTS[data['role']]}")
    socket: Annotated[
        str,
        Field(description="Unix socket of the workers"),
        Flag("PATH", default="kvferry-ROLE.sock in XDG_RUNTIME_DIR, else in the temporary folder"),
    ] = Field(default_factory=lambda data: os.path.join(runtime_dir(), f"kvferry-{data['role']}.sock"))
    metrics: Annotated[
        Address,
        BeforeValidator(_metrics),
        Field(description="where Prometheus scrapes, over plain HTTP; off: nowhere"),
        Flag("HOST:PORT|off", default="127.0.0.1:9470, of a prefill daemon 127.0.0.1:9471"),
    ] = Field(default_factory=_default_metrics)
    peers: Annotated[
        Peers, Field(description="a prefill daemon; may be repeated"), Flag("NAME=HOST:PORT", repeated="--peer")
    ] = Field(default_factory=dict)
    peer_service: Annotated[
        Address,
        Field(description="a name of DNS whose addresses are prefill daemons, looked up again and again"),
        Flag("HOST:PORT", default="none"),
    ] = ""
    pool: Annotated[
        Literal["daemon", "engine"],
        Field(
            description="whose memory each role's KV pool is: the daemon's, or that of its one engine process, which "
            "registers it and says its size and storage"
        ),
    ] = "daemon"
    pool_bytes: Annotated[Size, Field(ge=1, le=1 << 48, description="of each role's KV pool"), Flag("SIZE")] = 1 << 30
    page_size: Annotated[int, Field(ge=1, le=4096, description="tokens of a page"), Flag("TOKENS")] = 64
    shm_dir: Annotated[str, Field(description="where the pools' shared memory lies"), Flag("DIR")] = "/dev/shm"
    device: Annotated[
        Device,
        Field(description="where the pool is: shared memory, or a GPU for each rank"),
        Flag("cpu|cuda:I,..."),
    ] = "cpu"
    ranks: Annotated[
        int,
        Field(ge=1, le=MAX_RANKS, description="tensor-parallel ranks that share the pages"),
        Flag("N", default="one a device"),
    ] = Field(default_factory=lambda data: max(1, len(parse_device(data["device"]))))
    storage: Annotated[
        Literal["page", "layer", "layer-blocks"],
        Field(description="of a rank's pool: whole pages, a tensor for each K and V of a layer, or one a layer"),
    ] = "page"
    slots: Annotated[
        int, Field(ge=1, le=1024, description="receive slots of a session and rank, and sending slots of one")
    ] = 16
    slot_bytes: Annotated[
        Size,
        Field(ge=4096, le=1 << 29, description="of a slot, beside its header"),
        Flag("SIZE", default="8MiB, on GPUs 64MiB"),
    ] = Field(default_factory=lambda data: (8 << 20) if data["device"] == "cpu" else (64 << 20))
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24, description="prompt + output of a request")] = 1 << 20
    queue: Annotated[int, Field(ge=1, le=1 << 16, description="requests that may wait")] = 1024
    max_peers: Annotated[int, Field(ge=1, le=1024, description="sessions at most")] = 64
    max_workers: Annotated[int, Field(ge=1, le=1024, description="workers at most")] = 64
    admission_seconds: Annotated[Seconds, Field(description="that a request waits for admission at most")] = 30.0
    transfer_seconds: Annotated[Seconds, Field(description="a request's deadline until it is ready, at most")] = 60.0
    heartbeat_seconds: Annotated[Seconds, Field(description="between heartbeats of a session")] = 0.5
    peer_lost_seconds: Annotated[Seconds, Field(description="a peer that says nothing for so long is lost")] = 3.0
    grace_seconds: Annotated[Seconds, Field(description="that running requests have at the end")] = 30.0
    stalled_seconds: Annotated[
        Seconds, Field(description="not healthy when a part of the daemon has not moved for so long")
    ] = 10.0
    orphaned_share: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            allow_inf_nan=False,
            description="of a pool that may belong to lost workers before requests are refused",
        ),
        Flag("SHARE"),
    ] = 0.5
    copy_threads: Annotated[int, Field(ge=1, le=64, description="threads of large copies on the CPU")] = 1
    host_bytes: Annotated[
        Size, Field(ge=0, le=1 << 48, description="of each role's host tier; 0: none"), Flag("SIZE")
    ] = 0
    host_dir: Annotated[
        str,
        Field(description="keep the host tier in a file there, to be found at the next start"),
        Flag("DIR", default="none"),
    ] = ""
    checksums: Annotated[
        Choice,
        Field(
            description="of spilled pages, verified whenever they are restored, and of what travels in sessions, "
            "verified before it is published"
        ),
    ] = "off"
    zero_freed: Annotated[Choice, Field(description="clear pages that were used before a request has them again")] = (
        "off"
    )
    policy: Annotated[Policy, Field(description="of eviction"), Flag("{" + ",".join(policy_names()) + "}")] = "lru"
    evict_output_first: Annotated[bool, Field(description="generated pages go before prompts' pages")] = False
    write_through_hits: Annotated[
        int,
        Field(ge=0, le=1 << 20, description="copy what was hit so often to the host before it is evicted; 0: never"),
        Flag("N"),
    ] = 0
    quotas: Annotated[
        Quotas,
        Field(
            description="pages that others may not evict, and pages at most (0: none), of a namespace (hexadecimal) or "
            "of `default`, all others; may be repeated"
        ),
        Flag("NAMESPACE=SOFT:HARD[:HOST_SOFT:HOST_HARD]", repeated="--quota"),
    ] = Field(default_factory=dict)
    overcommit: Annotated[
        float,
        Field(
            ge=1,
            le=100,
            allow_inf_nan=False,
            description="promise 1/FACTOR of the pages that requests may grow by; the youngest is retracted when it "
            "fails",
        ),
        Flag("FACTOR"),
    ] = 1.0
    overtakes: Annotated[
        int,
        Field(ge=0, le=1 << 16, description="later requests that may overtake a waiting one that does not fit"),
        Flag("K"),
    ] = OVERTAKES
    reuse: Annotated[Choice, Field(description="off: nothing is matched or kept, the baseline of comparisons")] = "on"
    ucx_ports: Annotated[Ports, Field(description="of NIXL's data plane"), Flag("FIRST-LAST")] = (21000, 21063)
    ucx_tls: Annotated[
        Transports,
        Field(description="transports that UCX may use between couriers (UCX_TLS)"),
        Flag("NAME,...", default="tcp, and on GPUs cuda_copy,cuda_ipc,tcp"),
    ] = ""
    tls_cert: Annotated[
        str,
        Field(
            description="this daemon's certificate, or its chain, in PEM: with --tls-key and --tls-ca all of --listen "
            "is mutual TLS; the files may be replaced while it runs"
        ),
        Flag("FILE", default="none"),
    ] = ""
    tls_key: Annotated[str, Field(description="the certificate's key, in PEM"), Flag("FILE", default="none")] = ""
    tls_ca: Annotated[
        str,
        Field(description="the authorities whose certificates are believed, in PEM"),
        Flag("FILE", default="none"),
    ] = ""
    tls_peers: Annotated[
        TlsPeers,
        Field(
            description="an alternative name (DNS, URI, address) of certificates that may open a session here, or are "
            "dialled from here; may be repeated"
        ),
        Flag("NAME", repeated="--tls-peer"),
    ] = ()
    events: Annotated[
        Endpoint,
        Field(description="publish what the decode side holds there, over ZeroMQ, as vLLM does"),
        Flag("tcp://HOST:PORT", default="none"),
    ] = ""
    events_replay: Annotated[
        Endpoint,
        Field(description="where subscribers ask for batches that they missed"),
        Flag("tcp://HOST:PORT", default="none"),
    ] = ""
    events_topic: Annotated[str, Field(max_length=128, description="of the events"), Flag("TOPIC", default="empty")] = (
        ""
    )
    events_buffer: Annotated[int, Field(ge=1, le=1 << 20, description="batches of events kept for replay")] = 10_000
    otel: Annotated[
        str,
        Field(description="the OTLP/HTTP collector that traces go to"),
        Flag("URL", default="$OTEL_EXPORTER_OTLP_ENDPOINT, or none"),
    ] = ""
    insecure: Annotated[bool, Field(description="allow an address that is not loopback without TLS")] = False
    reflection: Annotated[bool, Field(description="serve gRPC reflection")] = False
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Field(description="of the log on stderr")] = (
        "info"
    )

    @property
    def devices(self) -> tuple[int, ...]:
        """The GPU of each rank; () on the CPU."""
        return parse_device(self.device)

    @property
    def roles(self) -> tuple[str, ...]:
        return ("decode", "prefill") if self.role == "both" else (self.role,)

    @model_validator(mode="after")
    def _together(self) -> DaemonConfig:
        """What no setting says alone."""
        host, _ = parse_address(self.listen)
        if not is_loopback(host) and not self.insecure and not self.tls_cert:
            raise ConfigError(
                f"--listen is {self.listen}: without --tls-cert, --tls-key and --tls-ca sessions are not encrypted, "
                "and an address that is not loopback needs --insecure"
            )
        if is_loopback(host) and names_rdma(self.ucx_tls) and not self.insecure:
            raise ConfigError(
                f"--ucx-tls is {self.ucx_tls}, and --listen {self.listen}: RDMA devices have no loopback address, "
                "couriers would be reached from the network. A --listen that is not loopback, transports without RDMA, "
                "or --insecure"
            )
        dialled = [(f"--peer {name}", parse_address(address)[0]) for name, address in self.peers.items()]
        if self.peer_service:
            dialled.append(("--peer-service", parse_address(self.peer_service)[0]))
        files = {"--tls-cert": self.tls_cert, "--tls-key": self.tls_key, "--tls-ca": self.tls_ca}
        check_tls(files, self.tls_peers, serves_peers="prefill" in self.roles, dialled=dialled)
        if self.events and "decode" not in self.roles:
            raise ConfigError(f"--events is {self.events}, but --role is prefill: only the decode side publishes")
        if self.events_replay and not self.events:
            raise ConfigError(f"--events-replay is {self.events_replay}, but --events is not given: there are none")
        for flag, endpoint in (("--events", self.events), ("--events-replay", self.events_replay)):
            if endpoint and not is_loopback(parse_address(endpoint.removeprefix("tcp://"))[0]) and not self.insecure:
                raise ConfigError(
                    f"{flag} is {endpoint}: events are not encrypted, and have the tokens of prompts; "
                    "an address that is not loopback needs --insecure"
                )
        if self.peer_service and "decode" not in self.roles:
            raise ConfigError(f"--peer-service is {self.peer_service}, but --role is prefill: only decode daemons dial")
        if self.devices and self.ranks != len(self.devices):
            raise ConfigError(f"--device is {self.device!r}, of {len(self.devices)} ranks; --ranks is {self.ranks}")
        if self.peer_lost_seconds < 2 * self.heartbeat_seconds:
            raise ConfigError(
                f"--peer-lost-seconds is {self.peer_lost_seconds:g}; it must be at least twice --heartbeat-seconds, "
                f"{self.heartbeat_seconds:g}: else a heartbeat that is a little late costs the session"
            )
        if self.slots * self.ranks > MAX_SLOTS:
            raise ConfigError(
                f"--slots is {self.slots} of each of {self.ranks} --ranks; together they must be {MAX_SLOTS} at most"
            )
        if self.host_dir and not self.host_bytes:
            raise ConfigError(f"--host-dir is {self.host_dir!r}, but --host-bytes is 0: there is no host tier to keep")
        if self.write_through_hits and not self.host_bytes:
            raise ConfigError(
                f"--write-through-hits is {self.write_through_hits}, but --host-bytes is 0: there is no host tier to "
                "copy to"
            )
        for namespace, quota in self.quotas.items():
            if (quota.host_soft or quota.host_hard) and not self.host_bytes:
                raise ConfigError(
                    f"--quota {namespace}={quota.soft}:{quota.hard}:{quota.host_soft}:{quota.host_hard} has a quota of "
                    "the host tier, but --host-bytes is 0: there is none"
                )
        digests = self.max_tokens // self.page_size * DIGEST_BYTES
        if digests + 65536 > MAX_MESSAGE_BYTES:
            raise ConfigError(
                f"--max-tokens is {self.max_tokens}: at --page-size {self.page_size} its digests are {digests} bytes; "
                f"a message takes {MAX_MESSAGE_BYTES}"
            )
        first, last = self.ucx_ports
        if last - first + 1 < len(self.peers):
            raise ConfigError(f"--ucx-ports {first}-{last} are fewer than the {len(self.peers)} peers; each takes one")
        if len(self.peers) > self.max_peers:
            raise ConfigError(f"--peer names {len(self.peers)}; --max-peers is {self.max_peers}")
        return self


def new_incarnation() -> bytes:
    """16 random bytes that name this process."""
    return secrets.token_bytes(16)
