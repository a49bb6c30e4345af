"""Checks across settings: which values cannot be together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvferry.daemon.config.tls_names import check_tls
from kvferry.daemon.config.values import ConfigError, parse_address
from kvferry.listening import is_loopback, needs
from kvferry.proto.limits import MAX_MESSAGE_BYTES
from kvferry.radix.digests import DIGEST_BYTES
from kvferry.transfer.courier.config import ANY_ADDRESS, names_rdma
from kvferry.transfer.courier.messages import MAX_SLOTS

if TYPE_CHECKING:
    from kvferry.daemon.config.model import DaemonConfig


def check_together(config: DaemonConfig) -> None:
    """ConfigError, which names the flags."""
    host, _ = parse_address(config.listen)
    if not is_loopback(host) and not config.insecure and not config.tls_cert:
        why = "without --tls-cert, --tls-key and --tls-ca sessions are not encrypted"
        raise ConfigError(needs("--listen", config.listen, why))
    _check_metrics(config)
    _check_rdma(config)
    dialled = [(f"--peer {name}", parse_address(address)[0]) for name, address in config.peers.items()]
    if config.peer_service:
        dialled.append(("--peer-service", parse_address(config.peer_service)[0]))
    files = {"--tls-cert": config.tls_cert, "--tls-key": config.tls_key, "--tls-ca": config.tls_ca}
    check_tls(files, config.tls_peers, serves_peers="prefill" in config.roles, dialled=dialled)
    if config.events and "decode" not in config.roles:
        raise ConfigError(f"--events is {config.events}, but --role is prefill: only the decode side publishes")
    if config.events_replay and not config.events:
        raise ConfigError(f"--events-replay is {config.events_replay}, but --events is not given: there are none")
    for flag, endpoint in (("--events", config.events), ("--events-replay", config.events_replay)):
        if endpoint and not is_loopback(parse_address(endpoint.removeprefix("tcp://"))[0]) and not config.insecure:
            raise ConfigError(needs(flag, endpoint, "events are not encrypted, and have the tokens of prompts"))
    if config.peers and "decode" not in config.roles:
        raise ConfigError(f"--peer names {', '.join(config.peers)}, but --role is prefill: only decode daemons dial")
    if config.peer_service and "decode" not in config.roles:
        raise ConfigError(f"--peer-service is {config.peer_service}, but --role is prefill: only decode daemons dial")
    if config.devices and config.ranks != len(config.devices):
        raise ConfigError(f"--device is {config.device!r}, of {len(config.devices)} ranks; --ranks is {config.ranks}")
    if config.peer_lost_seconds < 2 * config.heartbeat_seconds:
        raise ConfigError(
            f"--peer-lost-seconds is {config.peer_lost_seconds:g}; it must be at least twice --heartbeat-seconds, "
            f"{config.heartbeat_seconds:g}: else a heartbeat that is a little late costs the session"
        )
    if config.slots * config.ranks > MAX_SLOTS:
        raise ConfigError(
            f"--slots is {config.slots} of each of {config.ranks} --ranks; together they must be {MAX_SLOTS} at most"
        )
    if config.host_dir and not config.host_bytes:
        raise ConfigError(
            f"--host-dir is {config.host_dir!r}, but --host-bytes is 0: there is no host tier to keep; say how large "
            "it is, --host-bytes 64GiB for instance"
        )
    if config.write_through_hits and not config.host_bytes:
        raise ConfigError(
            f"--write-through-hits is {config.write_through_hits}, but --host-bytes is 0: there is no host tier to "
            "copy to"
        )
    for namespace, quota in config.quotas.items():
        if (quota.host_soft or quota.host_hard) and not config.host_bytes:
            raise ConfigError(
                f"--quota {namespace}={quota.soft}:{quota.hard}:{quota.host_soft}:{quota.host_hard} has a quota of "
                "the host tier, but --host-bytes is 0: there is none"
            )
    digests = config.max_tokens // config.page_size * DIGEST_BYTES
    if digests + 65536 > MAX_MESSAGE_BYTES:
        raise ConfigError(
            f"--max-tokens is {config.max_tokens}: at --page-size {config.page_size} its digests are {digests} bytes; "
            f"a message takes {MAX_MESSAGE_BYTES}"
        )
    first, last = config.ucx_ports
    if last - first + 1 < len(config.peers):
        raise ConfigError(f"--ucx-ports {first}-{last} are fewer than the {len(config.peers)} peers; each takes one")
    if len(config.peers) > config.max_peers:
        raise ConfigError(f"--peer names {len(config.peers)}; --max-peers is {config.max_peers}")


def _check_metrics(config: DaemonConfig) -> None:
    """The metrics and the live page beside them. ConfigError."""
    inside = not config.metrics or is_loopback(parse_address(config.metrics)[0])
    if not inside and not config.insecure and not config.insecure_metrics:
        why = "metrics are plain HTTP, without a login"
        raise ConfigError(needs("--metrics", config.metrics, why, by="--insecure-metrics or --insecure"))
    if config.ui and not config.metrics:
        raise ConfigError("--ui is on, but --metrics is off: the live page is served at its address")
    if config.ui_daemons and not config.ui:
        raise ConfigError(f"--ui-daemon names {', '.join(config.ui_daemons)}, but --ui is off: there is no live page")


def _check_rdma(config: DaemonConfig) -> None:
    host, _ = parse_address(config.listen)
    if is_loopback(host) and names_rdma(config.ucx_tls) and not config.insecure:
        raise ConfigError(
            f"--ucx-tls is {config.ucx_tls}, and --listen {config.listen}: RDMA devices have no loopback address, "
            "couriers would be reached from the network. A --listen that is not loopback, transports without RDMA, "
            "or --insecure"
        )
    if not config.rdma_ports:
        return
    if not names_rdma(config.ucx_tls):
        raise ConfigError(
            f"--rdma-ports is {config.rdma_ports}, and --ucx-tls {config.ucx_tls or 'not given'}: no transport of RDMA "
            "uses them; name one, like rc,cuda_copy,cuda_ipc,tcp"
        )
    if host.strip("[]") in ANY_ADDRESS:
        raise ConfigError(
            f"--rdma-ports is {config.rdma_ports}, and --listen {config.listen}: couriers on every interface use every "
            "device; give --listen the address of one"
        )
