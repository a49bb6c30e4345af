"""deploy/kubernetes, as kustomize renders it: schemas, the "restricted" pod security standard, settings that are
settings, ports that are those of the daemons.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from kvferry import listening
from kvferry.daemon.backstop import LATER_SECONDS
from kvferry.daemon.cli import main as cli
from kvferry.daemon.cli import serve
from kvferry.daemon.config import sources as config_sources
from kvferry.daemon.config.model import DaemonConfig
from kvferry.daemon.config.values import parse_address, parse_size
from kvferry.daemon.peers.handshake import courier_config
from kvferry.daemon.server import END_SECONDS
from kvferry.transfer.courier.config import courier_environment
from kvferry.workers import main as workers_main

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
RULES = KUBERNETES.parent / "prometheus" / "kvferry.rules.yaml"
OVERLAYS = ("cpu", "gpu", "rdma", "node")
VERSION = "1.36"
MONITORING = "monitoring.coreos.com/v1"
CERT_MANAGER = "cert-manager.io/v1"
Document = dict[str, Any]

# What is used of the Prometheus operator's and cert-manager's resources, no more: a key that is misspelt is refused.
_LABELS = {"type": "object", "additionalProperties": {"type": "string"}}
_RULE = {
    "type": "object",
    "required": ["alert", "expr"],
    "additionalProperties": False,
    "properties": {
        "alert": {"type": "string"},
        "expr": {"type": "string"},
        "for": {"type": "string", "pattern": "^[0-9]+[smh]$"},
        "labels": _LABELS,
        "annotations": _LABELS,
    },
}
_GROUP = {
    "type": "object",
    "required": ["name", "rules"],
    "additionalProperties": False,
    "properties": {"name": {"type": "string"}, "rules": {"type": "array", "items": _RULE}},
}
_ENDPOINT = {
    "type": "object",
    "required": ["port"],
    "additionalProperties": False,
    "properties": {"port": {"type": "string"}, "interval": {"type": "string"}},
}
_DURATION = {"type": "string", "pattern": "^[0-9]+h$"}
_KEY = {
    "type": "object",
    "required": ["algorithm", "size"],
    "additionalProperties": False,
    "properties": {
        "algorithm": {"const": "ECDSA"},
        "size": {"enum": [256, 384]},
        "rotationPolicy": {"enum": ["Always", "Never"]},
    },
}
_ISSUER_REF = {
    "type": "object",
    "required": ["name", "kind"],
    "additionalProperties": False,
    "properties": {"name": {"type": "string"}, "kind": {"enum": ["Issuer", "ClusterIssuer"]}},
}
SPECS: dict[str, Document] = {
    "PrometheusRule": {
        "required": ["groups"],
        "additionalProperties": False,
        "properties": {"groups": {"type": "array", "minItems": 1, "items": _GROUP}},
    },
    "Issuer": {
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 1,
        "properties": {
            "selfSigned": {"type": "object", "maxProperties": 0},
            "ca": {
                "type": "object",
                "required": ["secretName"],
                "additionalProperties": False,
                "properties": {"secretName": {"type": "string"}},
            },
        },
    },
    "Certificate": {
        "required": ["secretName", "issuerRef"],
        "additionalProperties": False,
        "properties": {
            "isCA": {"type": "boolean"},
            "commonName": {"type": "string"},
            "secretName": {"type": "string"},
            "duration": _DURATION,
            "renewBefore": _DURATION,
            "privateKey": _KEY,
            "usages": {"type": "array", "items": {"enum": ["digital signature", "server auth", "client auth"]}},
            "dnsNames": {"type": "array", "minItems": 1, "items": {"type": "string"}},
            "issuerRef": _ISSUER_REF,
        },
    },
    "PodMonitor": {
        "required": ["selector", "podMetricsEndpoints"],
        "additionalProperties": False,
        "properties": {
            "selector": {"type": "object", "properties": {"matchLabels": _LABELS}, "additionalProperties": False},
            "jobLabel": {"type": "string"},
            "podMetricsEndpoints": {"type": "array", "minItems": 1, "items": _ENDPOINT},
        },
    },
}


def rendered(overlay: str) -> list[Document]:
    """As `kubectl apply -k` would send it; nothing is fetched."""
    if shutil.which("kubectl") is None and shutil.which("kustomize") is None:
        pytest.skip("neither kubectl nor kustomize is here")
    command = ["kubectl", "kustomize"] if shutil.which("kubectl") else ["kustomize", "build"]
    done = subprocess.run(
        [*command, str(KUBERNETES / "overlays" / overlay)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


@pytest.fixture(scope="module")
def overlays() -> dict[str, list[Document]]:
    return {overlay: rendered(overlay) for overlay in OVERLAYS}


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """(name, pod template) of every workload."""
    for document in documents:
        if document["kind"] in ("StatefulSet", "Deployment", "DaemonSet"):
            yield document["metadata"]["name"], document["spec"]["template"]


def containers(template: Document) -> list[Document]:
    spec = template["spec"]
    return [*spec.get("initContainers", []), *spec["containers"]]


def daemon_of(template: Document) -> Document:
    return next(container for container in containers(template) if container["name"] == "kvferry")


def config_of(container: Document) -> DaemonConfig:
    """What the daemon would make of its variables; the pod's address stands in for what Kubernetes fills in."""
    filled = {"status.podIP": "10.0.0.9", "metadata.name": "pod-0", "spec.nodeName": "node-0"}
    environ: dict[str, str] = {}
    for entry in container["env"]:
        if "value" in entry:
            value = re.sub(r"\$\((\w+)\)", lambda found: environ[found[1]], entry["value"])
        else:
            value = filled[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        environ[entry["name"]] = value
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return config_sources.load(parser.parse_args(container["args"][1:]), environ).config


# -- schemas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_keeps_to_its_schema(overlays: dict[str, list[Document]], overlay: str) -> None:
    for document in overlays[overlay]:
        if document["apiVersion"] in (MONITORING, CERT_MANAGER):
            jsonschema.validate(document["spec"], {"type": "object", **SPECS[document["kind"]]})
        else:
            kubernetes_validate.validate(document, VERSION, strict=True)
        assert document["kind"] == "Namespace" or document["metadata"]["namespace"] == "kvferry"


def test_the_validator_refuses_what_is_wrong(overlays: dict[str, list[Document]]) -> None:
    wrong = yaml.safe_load(yaml.safe_dump(of_kind(overlays["cpu"], "StatefulSet")[0]))
    wrong["spec"]["template"]["spec"]["containers"][0]["readinesProbe"] = {}
    with pytest.raises(kubernetes_validate.utils.ValidationError):
        kubernetes_validate.validate(wrong, VERSION, strict=True)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"groups": [{"name": "x", "rules": [{"alert": "a"}]}]}, SPECS["PrometheusRule"])


def test_the_alerts_are_those_of_prometheus(overlays: dict[str, list[Document]]) -> None:
    for documents in overlays.values():
        rule = of_kind(documents, "PrometheusRule")[0]
        assert rule["spec"]["groups"] == yaml.safe_load(RULES.read_text())["groups"]


# -- what pods may do -------------------------------------------------------------------------------------------------


def beyond_restricted(template: Document) -> set[str]:
    """What of a pod is outside of the "restricted" pod security standard."""
    found = set()
    spec = template["spec"]
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            found.add(field)
    for volume in spec.get("volumes", []):
        kind = next(key for key in volume if key != "name")
        if kind not in ("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "secret"):
            found.add(f"volume {kind}")
    pod_context = spec.get("securityContext", {})
    for container in containers(template):
        context = container.get("securityContext", {})
        if context.get("privileged"):
            found.add("privileged")
        if context.get("allowPrivilegeEscalation") is not False:
            found.add("allowPrivilegeEscalation")
        if context.get("capabilities", {}).get("drop") != ["ALL"]:
            found.add("capabilities not dropped")
        found |= {f"capability {name}" for name in context.get("capabilities", {}).get("add", [])} - {
            "capability NET_BIND_SERVICE"
        }
        if not context.get("runAsNonRoot", pod_context.get("runAsNonRoot")):
            found.add("may run as root")
        if context.get("runAsUser", pod_context.get("runAsUser")) == 0:
            found.add("runs as root")
        profile = context.get("seccompProfile", pod_context.get("seccompProfile", {})).get("type")
        if profile not in ("RuntimeDefault", "Localhost"):
            found.add("seccomp")
        if any(port.get("hostPort") for port in container.get("ports", [])):
            found.add("hostPort")
        assert context.get("readOnlyRootFilesystem") is True  # beyond the standard
    return found


EXTRA_RIGHTS = {"cpu": set(), "gpu": set(), "rdma": set(), "node": {"volume hostPath"}}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_keep_to_the_restricted_standard(overlays: dict[str, list[Document]], overlay: str) -> None:
    found = [beyond_restricted(template) for _, template in pods(overlays[overlay])]
    assert found
    assert set().union(*found) == EXTRA_RIGHTS[overlay]
    enforced = of_kind(overlays[overlay], "Namespace")[0]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    assert enforced == ("privileged" if EXTRA_RIGHTS[overlay] else "restricted")
    if EXTRA_RIGHTS[overlay]:  # each is justified where it is asked for
        folder = KUBERNETES / "overlays" / overlay
        text = "".join(path.read_text() for path in folder.iterdir())
        for right in EXTRA_RIGHTS[overlay]:
            assert re.search(rf"#[^\n]*{right.split()[-1]}", text), right


def test_the_rules_see_what_is_not_restricted() -> None:
    bad = {"spec": {"hostIPC": True, "volumes": [{"name": "x", "hostPath": {"path": "/"}}], "containers": []}}
    bad["spec"]["containers"] = [{"name": "c", "securityContext": {"privileged": True, "readOnlyRootFilesystem": True}}]
    assert beyond_restricted(bad) >= {"hostIPC", "volume hostPath", "privileged", "may run as root", "seccomp"}


# -- what daemons are told --------------------------------------------------------------------------------------------


def engine_grace(template: Document) -> float:
    """A sidecar is told to end when the pod's engines have ended: both take their time of the pod's one period."""
    engines = [c for c in template["spec"]["containers"] if c["name"] == "engine"]
    parser = argparse.ArgumentParser()
    workers_main.add_arguments(parser)
    told = [parser.parse_args(engine["args"][1:]) for engine in engines]
    assert not any(listening.problem(args, "it is of a pod") for args in told)
    return sum(float(args.grace) for args in told)


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
        assert limit >= config.pool_bytes + slots + (256 << 20)
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        shm = next(mount["name"] for mount in daemon["volumeMounts"] if mount["mountPath"] == config.shm_dir)
        if "emptyDir" in volumes[shm]:
            assert volumes[shm]["emptyDir"]["medium"] == "Memory"
            assert parse_size(volumes[shm]["emptyDir"]["sizeLimit"] + "B") > config.pool_bytes + config.host_bytes
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


# -- certificates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_sessions_are_mutual_tls_with_the_names_that_each_side_expects(
    overlays: dict[str, list[Document]], overlay: str
) -> None:
    documents = overlays[overlay]
    made = {d["spec"]["secretName"]: d["spec"] for d in of_kind(documents, "Certificate")}
    issuers = {d["metadata"]["name"]: d["spec"] for d in of_kind(documents, "Issuer")}
    for spec in made.values():
        assert spec["issuerRef"]["name"] in issuers
    assert issuers["kvferry-ca"]["ca"]["secretName"] in made and made["kvferry-ca"]["isCA"] is True
    for _, template in pods(documents):
        daemon, role = daemon_of(template), template["metadata"]["labels"]["kvferry/role"]
        config = config_of(daemon)
        assert not config.insecure and config.insecure_metrics
        folder = next(m for m in daemon["volumeMounts"] if m["name"] == "tls")
        assert folder["readOnly"] is True and "subPath" not in folder  # a subPath would never be renewed
        paths = [config.tls_cert, config.tls_key, config.tls_ca]
        assert paths == [f"{folder['mountPath']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")]
        secret = next(v for v in template["spec"]["volumes"] if v["name"] == "tls")["secret"]
        assert secret["secretName"] == f"kvferry-{role}-tls" and secret["defaultMode"] == 0o440
        assert template["spec"]["securityContext"]["fsGroup"] == 65532
        assert made[secret["secretName"]]["usages"] == ["digital signature", "server auth", "client auth"]
        other = "decode" if role == "prefill" else "prefill"
        assert set(config.tls_peers) <= set(made[f"kvferry-{other}-tls"]["dnsNames"]) and config.tls_peers
        if role == "decode":
            assert parse_address(config.peer_service)[0] in made["kvferry-prefill-tls"]["dnsNames"]


def test_without_the_component_pods_are_insecure_and_say_so() -> None:
    base = KUBERNETES / "base" / "sidecar"
    for name in ("prefill.yaml", "decode.yaml"):
        (template,) = [d["spec"]["template"] for d in yaml.safe_load_all((base / name).read_text())]
        config = config_of(daemon_of(template))
        assert config.insecure and not config.tls_cert


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


# -- who may reach what -----------------------------------------------------------------------------------------------


def opened(policy: Document, role: str) -> set[tuple[int, int]]:
    """(first, last) ports open to pods of the other role."""
    found = set()
    for rule in policy["spec"]["ingress"]:
        for source in rule["from"]:
            if source.get("podSelector", {}).get("matchLabels", {}).get("kvferry/role") == role:
                found |= {(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}
    return found


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "rdma"])
def test_peers_reach_the_session_port_and_ucx_and_no_more(overlays: dict[str, list[Document]], overlay: str) -> None:
    documents = overlays[overlay]
    policies = {d["metadata"]["name"]: d for d in of_kind(documents, "NetworkPolicy")}
    configs = {name: config_of(daemon_of(template)) for name, template in pods(documents)}
    session = parse_address(configs["prefill"].listen)[1]
    assert opened(policies["kvferry-prefill"], "decode") == {(session, session), configs["prefill"].ucx_ports}
    assert opened(policies["kvferry-decode"], "prefill") == {configs["decode"].ucx_ports}
    for policy in policies.values():
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        assert all(rule.get("from") and rule.get("ports") for rule in policy["spec"]["ingress"])


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_selectors_select_something(overlays: dict[str, list[Document]], overlay: str) -> None:
    documents = overlays[overlay]
    labels = [template["metadata"]["labels"] for _, template in pods(documents)]

    def selects(wanted: dict[str, str]) -> bool:
        return any(wanted.items() <= of_pod.items() for of_pod in labels)

    monitor = of_kind(documents, "PodMonitor")[0]
    assert selects(monitor["spec"]["selector"]["matchLabels"])
    named = {port["name"] for _, template in pods(documents) for c in containers(template) for port in c["ports"]}
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= named
    for budget in of_kind(documents, "PodDisruptionBudget"):
        assert selects(budget["spec"]["selector"]["matchLabels"])
    if overlay != "node":  # there, the prefill side is another kustomization's
        for service in of_kind(documents, "Service"):
            assert selects(service["spec"]["selector"])
        for policy in of_kind(documents, "NetworkPolicy"):
            assert selects(policy["spec"]["podSelector"]["matchLabels"])


def test_gpu_pods_share_one_claim(overlays: dict[str, list[Document]]) -> None:
    template_name = of_kind(overlays["gpu"], "ResourceClaimTemplate")[0]["metadata"]["name"]
    for _, template in pods(overlays["gpu"]):
        spec = template["spec"]
        assert [claim["resourceClaimTemplateName"] for claim in spec["resourceClaims"]] == [template_name]
        assert spec["shareProcessNamespace"] is True
        for container in containers(template):
            assert container["resources"]["claims"] == [{"name": "gpu"}]
            assert container["image"] == "kvferry:cuda"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_daemons_have_the_gpu_and_the_transports_of_their_overlay(
    overlays: dict[str, list[Document]], overlay: str
) -> None:
    for _, template in pods(overlays[overlay]):
        config = config_of(daemon_of(template))
        assert config.devices == ((0,) if overlay in ("gpu", "rdma") else ())
        assert config.ucx_tls == ("rc,cuda_copy,cuda_ipc,tcp" if overlay == "rdma" else "")
        if overlay == "rdma":
            courier = courier_config(config, receive_slots=1, send_slots=0)
            assert courier_environment(courier, None, {"UCX_TLS": "tcp"})["UCX_TLS"] == config.ucx_tls
