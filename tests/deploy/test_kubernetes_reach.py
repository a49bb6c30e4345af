"""Who may reach what in deploy/kubernetes: certificates, network policies and selectors."""

from __future__ import annotations

import argparse

import pytest
import yaml

from kvferry.channels import tls_of
from kvferry.daemon.config.values import parse_address
from kvferry.front import main as front_main
from tests.deploy.manifests import (
    KUBERNETES,
    OVERLAYS,
    TLS_OVERLAYS,
    Document,
    all_pods,
    config_of,
    containers,
    daemon_of,
    of_kind,
    pods,
)


@pytest.mark.parametrize("overlay", TLS_OVERLAYS)
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


@pytest.mark.parametrize("overlay", ["cpu", "gpu", "gpu-plugin", "rdma"])
def test_front_ends_look_up_with_a_certificate(overlays: dict[str, list[Document]], overlay: str) -> None:
    documents = overlays[overlay]
    made = {d["spec"]["secretName"]: d["spec"] for d in of_kind(documents, "Certificate")}
    (spec,) = [template["spec"] for name, template in all_pods(documents) if name == "front"]
    (front,) = spec["containers"]
    parser = argparse.ArgumentParser()
    front_main.add_arguments(parser)
    environ = {entry["name"]: entry["value"] for entry in front["env"]}
    tls = tls_of(parser.parse_args(front["args"][1:]), environ)
    assert tls is not None and tls.name in made["kvferry-decode-tls"]["dnsNames"]
    mount = next(m["mountPath"] for m in front["volumeMounts"] if m["name"] == "tls")
    assert [tls.cert, tls.key, tls.ca] == [f"{mount}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")]
    secret = next(v["secret"] for v in spec["volumes"] if v["name"] == "tls")
    assert made[secret["secretName"]]["usages"] == ["digital signature", "client auth"]


def test_without_the_component_pods_are_insecure_and_say_so() -> None:
    base = KUBERNETES / "base" / "sidecar"
    for name in ("prefill.yaml", "decode.yaml"):
        (template,) = [d["spec"]["template"] for d in yaml.safe_load_all((base / name).read_text())]
        config = config_of(daemon_of(template))
        assert config.insecure and not config.tls_cert


def opened(policy: Document, role: str) -> set[tuple[int, int]]:
    """(first, last) ports open to pods of the other role."""
    found = set()
    for rule in policy["spec"]["ingress"]:
        for source in rule["from"]:
            if source.get("podSelector", {}).get("matchLabels", {}).get("kvferry/role") == role:
                found |= {(port["port"], port.get("endPort", port["port"])) for port in rule["ports"]}
    return found


@pytest.mark.parametrize("overlay", ["plain", "cpu", "gpu", "gpu-plugin", "rdma"])
def test_peers_reach_the_session_port_and_ucx_and_no_more(overlays: dict[str, list[Document]], overlay: str) -> None:
    documents = overlays[overlay]
    policies = {d["metadata"]["name"]: d for d in of_kind(documents, "NetworkPolicy")}
    assert set(policies) == {"kvferry-prefill", "kvferry-decode", "kvferry-front"}
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
    labels = [template["metadata"]["labels"] for _, template in all_pods(documents)]

    def selects(wanted: dict[str, str]) -> bool:
        return any(wanted.items() <= of_pod.items() for of_pod in labels)

    named = {port["name"] for _, template in pods(documents) for c in containers(template) for port in c["ports"]}
    for monitor in of_kind(documents, "PodMonitor"):
        assert selects(monitor["spec"]["selector"]["matchLabels"])
        assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= named
    for budget in of_kind(documents, "PodDisruptionBudget"):
        assert selects(budget["spec"]["selector"]["matchLabels"])
    if overlay != "node":  # there, the prefill side is another kustomization's
        for service in of_kind(documents, "Service"):
            assert selects(service["spec"]["selector"])
        for policy in of_kind(documents, "NetworkPolicy"):
            assert selects(policy["spec"]["podSelector"]["matchLabels"])


def test_without_operators_nothing_of_theirs_is_asked_for(overlays: dict[str, list[Document]]) -> None:
    """The plain overlay can be applied to any cluster: kinds of Kubernetes' own alone."""
    groups = {document["apiVersion"].rpartition("/")[0] for document in overlays["plain"]}
    assert groups == {"", "apps", "policy", "networking.k8s.io"}
    assert all(of_kind(overlays[overlay], "PodMonitor") for overlay in TLS_OVERLAYS)


@pytest.mark.parametrize("overlay", ["plain", "cpu", "gpu", "gpu-plugin", "rdma"])
def test_clients_have_an_endpoint_whose_front_end_reaches_every_engine(
    overlays: dict[str, list[Document]], overlay: str
) -> None:
    documents = overlays[overlay]
    (front,) = [t["spec"]["containers"][0] for name, t in all_pods(documents) if name == "front"]
    parser = argparse.ArgumentParser()
    front_main.add_arguments(parser)
    args = parser.parse_args(front["args"][1:])
    service = next(d for d in of_kind(documents, "Service") if d["metadata"]["name"] == "kvferry-front")
    assert [port["port"] for port in service["spec"]["ports"]] == [args.listen.port]
    vllm = overlay == "gpu-plugin"
    engines = {d["metadata"]["name"]: d["spec"] for d in of_kind(documents, "StatefulSet")}
    wanted = {
        role: [f"{role}-{i}.{spec['serviceName']}:{8000 if vllm else 8101}" for i in range(spec["replicas"])]
        for role, spec in engines.items()
    }
    if vllm:
        given = {"prefill": sum(args.vllm_prefill, ()), "decode": sum(args.vllm_decode, ())}
        assert [place.daemon for place in given["prefill"]] == ["prefill-0", "prefill-1"]
        assert [place.daemon_address for place in given["decode"]] == [
            f"decode-{i}.kvferry-decode:7070" for i in (0, 1)
        ]
        found = {role: [place.url for place in places] for role, places in given.items()}
        assert found == {role: [f"http://{address}" for address in told] for role, told in wanted.items()}
    else:
        assert {"prefill": args.prefill, "decode": args.decode} == wanted
    policies = {d["metadata"]["name"]: d for d in of_kind(documents, "NetworkPolicy")}
    for role, spec in engines.items():
        open_to_fronts = {
            port["port"]
            for rule in policies[f"kvferry-{role}"]["spec"]["ingress"]
            for source in rule["from"]
            if source.get("podSelector", {}).get("matchLabels") == {"kvferry/front": "true"}
            for port in rule["ports"]
        }
        (engine,) = spec["template"]["spec"]["containers"]
        assert {port["containerPort"] for port in engine["ports"]} <= open_to_fronts
