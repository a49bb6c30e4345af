"""Settings, memory, probes and devices that deploy/kubernetes gives to daemons."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import yaml

from kvferry import listening
from kvferry.connectors.settings import Settings
from kvferry.daemon.backstop import LATER_SECONDS
from kvferry.daemon.cli import main as cli
from kvferry.daemon.config.values import parse_address, parse_size
from kvferry.daemon.peers.handshake import courier_config
from kvferry.daemon.server import END_SECONDS
from kvferry.transfer.courier.config import courier_environment
from kvferry.workers import main as workers_main
from tests.deploy.manifests import KUBERNETES, OVERLAYS, Document, config_of, containers, daemon_of, of_kind, pods


def engine_grace(template: Document) -> float:
    """A sidecar is told to end when the pod's engines have ended: both take their time of the pod's one period."""
    engines = [c for c in template["spec"]["containers"] if c["name"] == "engine" and "command" not in c]
    parser = argparse.ArgumentParser()
    workers_main.add_arguments(parser)
    told = [parser.parse_args(engine["args"][1:]) for engine in engines]
    assert not any(listening.problem(args, "it is of a pod") for args in told)
    return pause(template) + sum(float(args.grace) for args in told)


def pause(template: Document) -> float:
    """Seconds that a pod's engine waits before it is told to end."""
    hooks = [c["lifecycle"]["preStop"] for c in template["spec"]["containers"] if "lifecycle" in c]
    return float(sum(hook["sleep"]["seconds"] for hook in hooks))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_daemons_take_their_settings_and_have_the_memory(overlays: dict[str, list[Document]], overlay: str) -> None:
    for name, template in pods(overlays[overlay]):
        daemon = daemon_of(template)
        config = config_of(daemon)
        role = template["metadata"]["labels"]["kvferry/role"]
        assert config.role == role, name
        ports = {port["name"]: port["containerPort"] for port in daemon["ports"]}
        assert ports == {
            "session": parse_address(config.listen)[1],
            "metrics": parse_address(config.metrics)[1],
        }
        limit = parse_size(daemon["resources"]["limits"]["memory"] + "B")
        slots = config.slots * config.slot_bytes * max(1, len(config.peers))
        pool = config.pool_bytes if config.pool == "daemon" else 0
        assert limit >= pool + config.host_bytes + slots + (256 << 20)
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        shm = next(mount["name"] for mount in daemon["volumeMounts"] if mount["mountPath"] == config.shm_dir)
        if "emptyDir" in volumes[shm]:
            assert volumes[shm]["emptyDir"]["medium"] == "Memory"
            assert parse_size(volumes[shm]["emptyDir"]["sizeLimit"] + "B") > pool
        folders = [mount["mountPath"] for mount in daemon["volumeMounts"]]
        assert str(Path(config.socket).parent) in folders
        assert "/tmp" in folders
        assert template["spec"]["enableServiceLinks"] is False
        own_end = config.grace_seconds + END_SECONDS + LATER_SECONDS
        assert template["spec"]["terminationGracePeriodSeconds"] > own_end + engine_grace(template)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_probes_are_commands_that_exist(overlays: dict[str, list[Document]], overlay: str) -> None:
    for _, template in pods(overlays[overlay]):
        daemon = daemon_of(template)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            words = daemon[probe]["exec"]["command"]
            assert words[0] == "kvferry" and words[1] in cli.COMMANDS
            assert ("--live" in words) == (probe == "livenessProbe")
            assert cli.main([*words[1:], "unix:/nowhere", "--timeout", "0.1"]) == 2  # it takes these flags


def test_peers_are_looked_up_at_the_headless_service(overlays: dict[str, list[Document]]) -> None:
    documents = overlays["cpu"]
    prefill = next(d for d in of_kind(documents, "StatefulSet") if d["metadata"]["name"] == "prefill")
    service = next(d for d in of_kind(documents, "Service") if d["metadata"]["name"] == prefill["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    port = service["spec"]["ports"][0]["port"]
    for overlay in OVERLAYS:
        decode = next(t for _, t in pods(overlays[overlay]) if t["metadata"]["labels"]["kvferry/role"] == "decode")
        config = config_of(daemon_of(decode))
        assert config.peer_service == f"{service['metadata']['name']}:{port}"
        if not config.devices:  # else slots lie on the GPU
            slots = config.slots * config.slot_bytes * prefill["spec"]["replicas"]
            assert slots <= 512 << 20  # the memory limit's room


def test_the_sidecar_starts_before_and_ends_after_the_engine(overlays: dict[str, list[Document]]) -> None:
    for _, template in pods(overlays["cpu"]):
        sidecar = template["spec"]["initContainers"][0]
        assert sidecar["restartPolicy"] == "Always"
        engine = template["spec"]["containers"][0]
        shared = [mount for mount in sidecar["volumeMounts"] if mount["name"] != "tls"]
        assert engine["volumeMounts"] == shared  # the key is the daemon's alone
        (term,) = template["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        labels = term["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert labels.items() <= template["metadata"]["labels"].items()
        assert pause(template) == 5


def test_the_two_roles_of_the_sidecar_differ_in_their_role_alone() -> None:
    """Each is one file, to be read and changed as a whole; what is changed in one is not forgotten in the other."""
    made = []
    for name in ("prefill.yaml", "decode.yaml"):
        (document,) = yaml.safe_load_all((KUBERNETES / "base" / "sidecar" / name).read_text())
        environment = daemon_of(document["spec"]["template"])["env"]
        environment[:] = [entry for entry in environment if entry["name"] != "KVFERRY_PEER_SERVICE"]
        made.append(yaml.safe_dump(document))
    prefill, decode = made
    for ours, theirs in (("prefill", "decode"), ("7071", "7070"), ("9471", "9470")):
        assert ours in prefill and theirs in decode
        prefill = prefill.replace(ours, theirs)
    assert prefill == decode


def test_gpu_pods_share_one_claim(overlays: dict[str, list[Document]]) -> None:
    template_name = of_kind(overlays["gpu"], "ResourceClaimTemplate")[0]["metadata"]["name"]
    for _, template in pods(overlays["gpu"]):
        spec = template["spec"]
        assert [claim["resourceClaimTemplateName"] for claim in spec["resourceClaims"]] == [template_name]
        assert spec["shareProcessNamespace"] is True
        assert any(toleration["key"] == "nvidia.com/gpu" for toleration in spec["tolerations"])
        for container in containers(template):
            assert container["resources"]["claims"] == [{"name": "gpu"}]
            assert container["image"] == "kvferry:cuda"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_daemons_have_the_gpu_and_the_transports_of_their_overlay(
    overlays: dict[str, list[Document]], overlay: str
) -> None:
    for _, template in pods(overlays[overlay]):
        config = config_of(daemon_of(template))
        assert config.devices == ((0,) if overlay in ("gpu", "gpu-plugin", "rdma") else ())
        assert config.ucx_tls == ("rc,cuda_copy,cuda_ipc,tcp" if overlay == "rdma" else "")
        if overlay == "rdma":
            courier = courier_config(config, receive_slots=1, send_slots=0)
            assert courier_environment(courier, None, {"UCX_TLS": "tcp"})["UCX_TLS"] == config.ucx_tls


def test_one_container_is_given_the_gpus_and_the_daemon_sees_the_same(overlays: dict[str, list[Document]]) -> None:
    """By the device plugin: the engine asks for as many as the node has; the daemon sees all, in the same order."""
    for name, template in pods(overlays["gpu-plugin"]):
        spec, daemon = template["spec"], daemon_of(template)
        (engine,) = spec["containers"]
        assert spec["shareProcessNamespace"] is True and spec["runtimeClassName"] == "nvidia"
        given = [c["name"] for c in containers(template) if "nvidia.com/gpu" in c["resources"]["limits"]]
        assert given == ["engine"], name
        count = int(engine["resources"]["limits"]["nvidia.com/gpu"])
        variables = {entry["name"]: entry.get("value") for entry in daemon["env"]}
        assert variables["NVIDIA_VISIBLE_DEVICES"] == "all"
        assert config_of(daemon).devices == tuple(range(count))
        assert f"--tensor-parallel-size={count}" in engine["args"]
        assert any(toleration["key"] == "nvidia.com/gpu" for toleration in spec["tolerations"])


def test_vllm_and_its_daemon_say_the_same(overlays: dict[str, list[Document]]) -> None:
    roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
    for name, template in pods(overlays["gpu-plugin"]):
        (engine,) = template["spec"]["containers"]
        config = config_of(daemon_of(template))
        flags = dict(word.removeprefix("--").split("=", 1) for word in engine["args"])
        told = json.loads(flags["kv-transfer-config"])
        settings = Settings.of(told["kv_connector_extra_config"])
        assert told["kv_role"] == roles[name]
        assert (settings.socket, settings.pool) == (config.socket, config.pool)
        assert config.pool == "engine"
        assert int(flags["block-size"]) == config.page_size
        (http,) = engine["ports"]
        assert (
            str(http["containerPort"]) == flags["port"] and engine["readinessProbe"]["httpGet"]["port"] == http["name"]
        )
        mounts = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
        assert mounts["model"] == flags["model"] and mounts["shm"] == config.shm_dir
        assert Path(config.socket).parent == Path(mounts["run"])
        assert (config.host_bytes > 0) == (name == "decode")
