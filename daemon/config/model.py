"""The settings of `kvferry serve`: one model of them all, their defaults, bounds and meanings. The flags, the keys of
the YAML file, the KVFERRY_* variables, `kvferry config` and the JSON schema are made from it. Sizes are bytes, times
seconds.
"""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvferry.daemon.config.checks import check_together
from kvferry.daemon.config.kinds import (
    Address,
    Choice,
    Device,
    Endpoint,
    Name,
    Names,
    Namespaces,
    Peers,
    Policy,
    Ports,
    Quotas,
    RdmaPorts,
    Seconds,
    Size,
    TlsPeers,
    Transports,
)
from kvferry.daemon.config.values import parse_address, parse_device, runtime_dir
from kvferry.daemon.core.admission_queue import OVERTAKES
from kvferry.radix.tree import policy_names
from kvferry.transfer.geometry.kv_geometry import StorageOrder
from kvferry.transfer.geometry.rank_lanes import MAX_RANKS

STORAGES = {
    "page": StorageOrder.PAGE_MAJOR,
    "layer": StorageOrder.LAYER_MAJOR,
    "layer-blocks": StorageOrder.LAYER_BLOCKS,
}


@dataclass(frozen=True, slots=True)
class Flag:
    """The differences of a setting's flag from the setting: what stands for its value, a name of its own if it may be
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


def closed_namespaces(config: DaemonConfig) -> frozenset[bytes]:
    """The ids of the namespaces that take no part in look-ups."""
    return frozenset(map(bytes.fromhex, config.closed_namespaces))


# -- the model -------------------------------------------------------------------------------------------------------

FILES_PER_PEER = 16  # stream, socket pair, log and slots of the courier, and while one is being replaced
FILES_PER_WORKER = 4
PORTS = {"decode": 7070, "prefill": 7071, "both": 7070}
METRICS_PORTS = {"decode": 9470, "prefill": 9471, "both": 9470}


def _default_metrics(data: dict[str, Any]) -> str:
    """The default address, on loopback whatever --listen says. Beside an address with any free port, any free port,
    too."""
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
        Flag("PATH", default="kvferry-ROLE.sock in XDG_RUNTIME_DIR, else in kvferry-UID in the temporary folder"),
    ] = Field(default_factory=lambda data: os.path.join(runtime_dir(), f"kvferry-{data['role']}.sock"))
    metrics: Annotated[
        Address,
        BeforeValidator(_metrics),
        Field(description="where Prometheus scrapes, over plain HTTP; off: nowhere"),
        Flag("HOST:PORT|off", default="127.0.0.1:9470, of a prefill daemon 127.0.0.1:9471"),
    ] = Field(default_factory=_default_metrics)
    ui: Annotated[bool, Field(description="serve the live page there, at /ui")] = False
    ui_daemons: Annotated[
        Peers,
        Field(description="another daemon that the live page shows, beside those of --peer; may be repeated"),
        Flag("NAME=HOST:PORT", repeated="--ui-daemon"),
    ] = Field(default_factory=dict)
    peers: Annotated[
        Peers,
        Field(description="a prefill daemon, by the name that requests give it: its own --name; may be repeated"),
        Flag("NAME=HOST:PORT", repeated="--peer"),
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
        Field(description="where the pool is: shared memory, or a GPU for each rank; cuda is cuda:0"),
        Flag("cpu|cuda[:I],..."),
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
            description="of a pool: when so much belongs to lost workers, requests are refused",
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
    write_ahead: Annotated[
        float,
        Field(
            ge=0,
            le=1,
            allow_inf_nan=False,
            description="of the pool: so much is free, or in the host tier before it is evicted; 0: none",
        ),
        Flag("SHARE"),
    ] = 0.0
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
    way_back: Annotated[
        Literal["off", "auto", "always"],
        BeforeValidator(lambda value: "off" if value is False else value),  # YAML's off
        Field(
            description="a prefill daemon fetches what it lacks of a prompt from the decode daemon that asks for it: "
            "where that is faster than to compute it (auto), or always; both must have it, and twice the slots"
        ),
    ] = "off"
    look_ups: Annotated[
        Choice,
        Field(
            description="with --way-back: what the decode daemon that asks lacks, too, a prefill daemon looks for at "
            "the others that it has a session with, and a decode daemon answers; both must have it"
        ),
    ] = "on"
    closed_peers: Annotated[
        Names,
        Field(description="a daemon that this one neither asks nor answers in look-ups; may be repeated"),
        Flag("NAME", repeated="--closed-peer"),
    ] = ()
    closed_namespaces: Annotated[
        Namespaces,
        Field(
            description="a namespace (hexadecimal) of which this daemon neither asks nor answers in look-ups; may be "
            "repeated"
        ),
        Flag("NAMESPACE", repeated="--closed-namespace"),
    ] = ()
    ucx_ports: Annotated[Ports, Field(description="of NIXL's data plane"), Flag("FIRST-LAST")] = (21000, 21063)
    ucx_tls: Annotated[
        Transports,
        Field(description="transports that UCX may use between couriers (UCX_TLS)"),
        Flag("NAME,...", default="tcp, and on GPUs cuda_copy,cuda_ipc,tcp"),
    ] = ""
    rdma_ports: Annotated[
        RdmaPorts,
        Field(description="RDMA ports that couriers may use, with transports of RDMA; UCX takes those near each GPU"),
        Flag("DEVICE:PORT,...", default="all of the machine"),
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
    insecure: Annotated[
        bool, Field(description="allow addresses that are not loopback: --listen without TLS, --metrics, --events")
    ] = False
    insecure_metrics: Annotated[bool, Field(description="allow them of --metrics alone")] = False
    reflection: Annotated[bool, Field(description="serve gRPC reflection")] = False
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Field(description="of the log on stderr")] = (
        "info"
    )

    @property
    def devices(self) -> tuple[int, ...]:
        """The GPU of each rank; () on the CPU."""
        return parse_device(self.device)

    @property
    def worker_processes(self) -> int:
        """The most that may have a session: of an engine, one for each rank."""
        return self.max_workers * self.ranks

    @property
    def open_files(self) -> int:
        """The most that it has at once."""
        return 128 + FILES_PER_PEER * self.max_peers + FILES_PER_WORKER * self.worker_processes

    @property
    def rdma(self) -> tuple[str, ...]:
        """The RDMA ports that couriers may use; () for all."""
        return tuple(self.rdma_ports.split(",")) if self.rdma_ports else ()

    @property
    def roles(self) -> tuple[str, ...]:
        return ("decode", "prefill") if self.role == "both" else (self.role,)

    @model_validator(mode="after")
    def _together(self) -> DaemonConfig:
        check_together(self)
        return self


def new_incarnation() -> bytes:
    """16 random bytes that name this process."""
    return secrets.token_bytes(16)
