"""The chart of deploy/helm, linted and rendered with its own values and with each example, by Helm's own engine."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import helm_python as helm
import pytest
import yaml

from kvferry import listening
from kvferry.connectors.settings import Settings
from kvferry.daemon.backstop import LATER_SECONDS
from kvferry.daemon.config.values import parse_address, parse_size
from kvferry.daemon.server import END_SECONDS
from kvferry.front import main as front_main
from kvferry.workers import main as worker_main
from tests.deploy.manifest_schemas import check_schema
from tests.deploy.manifests import Document, all_pods, config_of, containers, daemon_of, of_kind, pods
from tests.deploy.restricted import beyond_restricted

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "kvferry"
EXAMPLES = ("values", "tls", "vllm-plugin", "vllm-dra")
RELEASE = "kv"


def values(example: str) -> Document:
    """What is given besides the chart's own values."""
    found: Document = (
        {} if example == "values" else yaml.safe_load((CHART / "examples" / f"{example}.yaml").read_text())
    )
    return found


def rendered(given: Document) -> list[Document]:
    with helm.Chart.load(str(CHART)) as chart:
        made = chart.render(given, name=RELEASE, namespace="kvferry")
    texts = [text for path, text in made.items() if path.endswith(".yaml")]
    return [document for text in texts for document in yaml.safe_load_all(text) if document]


@pytest.fixture(scope="module")
def charts() -> dict[str, list[Document]]:
    return {example: rendered(values(example)) for example in EXAMPLES}


def test_helm_finds_nothing_wrong() -> None:
    found = helm.lint(str(CHART))
    assert not found["errors"]
    assert [message["error"] for message in found["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_every_object_keeps_to_its_schema(charts: dict[str, list[Document]], example: str) -> None:
    documents = charts[example]
    for document in documents:
        check_schema(document)
    names = [(document["kind"], document["metadata"]["name"]) for document in documents]
    assert len(names) == len(set(names)) and all(name.startswith(RELEASE) for _, name in names)
    kinds = {kind for kind, _ in names}
    operators = {"PodMonitor", "PrometheusRule", "Certificate", "Issuer"}
    assert kinds & operators == (operators if example in ("tls", "vllm-dra") else set())


@pytest.mark.parametrize("example", EXAMPLES)
def test_pods_keep_to_the_restricted_standard(charts: dict[str, list[Document]], example: str) -> None:
    found = [beyond_restricted(template) for _, template in all_pods(charts[example])]
    assert len(found) == 3
    assert not set().union(*found)


@pytest.mark.parametrize("example", EXAMPLES)
def test_daemons_take_their_settings_and_have_the_memory(charts: dict[str, list[Document]], example: str) -> None:
    documents = charts[example]
    replicas = {
        d["spec"]["template"]["metadata"]["labels"]["kvferry/role"]: d["spec"]["replicas"]
        for d in of_kind(documents, "StatefulSet")
    }
    services = {d["metadata"]["name"]: d["spec"] for d in of_kind(documents, "Service")}
    for _, template in pods(documents):
        daemon, spec = daemon_of(template), template["spec"]
        config = config_of(daemon)
        role = template["metadata"]["labels"]["kvferry/role"]
        assert config.role == role and config.insecure == (example not in ("tls", "vllm-dra"))
        ports = {port["name"]: port["containerPort"] for port in daemon["ports"]}
        assert ports == {"session": parse_address(config.listen)[1], "metrics": parse_address(config.metrics)[1]}
        shm = next(v["emptyDir"]["sizeLimit"] for v in spec["volumes"] if v["name"] == "shm")
        in_shm = 0 if config.devices or config.pool == "engine" else config.pool_bytes
        assert parse_size(shm + "B") >= in_shm + (64 << 20)
        sessions = replicas["decode" if role == "prefill" else "prefill"]
        slots = 0 if config.devices else config.slots * config.slot_bytes
        needs = in_shm + config.host_bytes + sessions * (slots + (60 << 20)) + (100 << 20)
        assert parse_size(daemon["resources"]["limits"]["memory"] + "B") >= needs
        if role == "decode":
            host, port = parse_address(config.peer_service)
            assert services[host]["clusterIP"] == "None" and services[host]["ports"][0]["port"] == port
        assert spec["terminationGracePeriodSeconds"] > 5 + 30 + config.grace_seconds + END_SECONDS + LATER_SECONDS


@pytest.mark.parametrize("example", EXAMPLES)
def test_engines_and_front_ends_take_their_words(charts: dict[str, list[Document]], example: str) -> None:
    documents = charts[example]
    given = values(example)
    vllm = given.get("engine", {}).get("kind") == "vllm"
    port, reachable = (8000 if vllm else 8101), {"prefill": set[str](), "decode": set[str]()}
    for document in of_kind(documents, "StatefulSet"):
        template = document["spec"]["template"]
        role = template["metadata"]["labels"]["kvferry/role"]
        (engine,) = template["spec"]["containers"]
        config = config_of(daemon_of(template))
        reachable[role] = {
            f"{document['metadata']['name']}-{i}.{document['spec']['serviceName']}:{port}"
            for i in range(document["spec"]["replicas"])
        }
        assert [each["containerPort"] for each in engine["ports"]] == [port]
        assert engine["lifecycle"]["preStop"] == {"sleep": {"seconds": 5}}
        if vllm:
            flags = dict(word.removeprefix("--").split("=", 1) for word in engine["args"])
            told = json.loads(flags["kv-transfer-config"])
            settings = Settings.of(told["kv_connector_extra_config"])
            assert (settings.socket, settings.pool) == (config.socket, config.pool) == (config.socket, "engine")
            assert told["kv_role"] == {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
            assert int(flags["block-size"]) == config.page_size
            assert int(flags["tensor-parallel-size"]) == len(config.devices)
        else:
            parser = argparse.ArgumentParser()
            worker_main.add_arguments(parser)
            args = parser.parse_args(engine["args"][1:])
            assert args.role == role and not listening.problem(args, "it is of a pod") and args.grace == 30
    (front,) = [t["spec"]["containers"][0] for name, t in all_pods(documents) if name == f"{RELEASE}-front"]
    parser = argparse.ArgumentParser()
    front_main.add_arguments(parser)
    args = parser.parse_args(front["args"][1:])
    if vllm:
        assert {place.url for places in args.vllm_decode for place in places} == {
            f"http://{a}" for a in reachable["decode"]
        }
        daemons = {place.daemon_address for places in args.vllm_decode for place in places}
        assert daemons == {address.rpartition(":")[0] + ":7070" for address in reachable["decode"]}
        named = {(place.daemon, place.url) for places in args.vllm_prefill for place in places}
        assert named == {(address.partition(".")[0], f"http://{address}") for address in reachable["prefill"]}
    else:
        assert {"prefill": set(args.prefill), "decode": set(args.decode)} == reachable


@pytest.mark.parametrize("example", ["vllm-plugin", "vllm-dra"])
def test_daemon_and_engine_see_the_same_gpus(charts: dict[str, list[Document]], example: str) -> None:
    gpu = values(example)["gpu"]
    for _, template in pods(charts[example]):
        spec, daemon = template["spec"], daemon_of(template)
        assert spec["shareProcessNamespace"] is True
        assert config_of(daemon).devices == tuple(range(gpu["count"]))
        asking = {c["name"]: c["resources"]["limits"].get("nvidia.com/gpu") for c in containers(template)}
        claims = {c["name"]: c["resources"].get("claims") for c in containers(template)}
        variables = {entry["name"]: entry.get("value") for entry in daemon["env"]}
        if gpu["by"] == "plugin":
            assert asking == {"kvferry": None, "engine": str(gpu["count"])}
            assert variables["NVIDIA_VISIBLE_DEVICES"] == "all" and spec["runtimeClassName"] == "nvidia"
            assert set(claims.values()) == {None}
        else:
            assert set(asking.values()) == {None} and "runtimeClassName" not in spec
            assert claims == {"kvferry": [{"name": "gpu"}], "engine": [{"name": "gpu"}]}
            (made,) = of_kind(charts[example], "ResourceClaimTemplate")
            assert spec["resourceClaims"][0]["resourceClaimTemplateName"] == made["metadata"]["name"]
            assert made["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"] == gpu["count"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_policies_open_what_is_asked_and_select_something(charts: dict[str, list[Document]], example: str) -> None:
    documents = charts[example]
    labels = [template["metadata"]["labels"] for _, template in all_pods(documents)]
    policies = {
        d["metadata"]["name"].removeprefix(f"{RELEASE}-"): d["spec"] for d in of_kind(documents, "NetworkPolicy")
    }
    assert set(policies) == {"prefill", "decode", "front"}
    for spec in policies.values():
        assert any(spec["podSelector"]["matchLabels"].items() <= of_pod.items() for of_pod in labels)
        for rule in spec["ingress"]:
            for source in rule["from"]:
                if wanted := source.get("podSelector", {}).get("matchLabels"):
                    assert any(wanted.items() <= of_pod.items() for of_pod in labels), wanted
    engine = next(t["spec"]["containers"][0]["ports"][0]["containerPort"] for _, t in pods(documents))
    opened = {
        role: [sorted(port["port"] for port in rule["ports"]) for rule in spec["ingress"]]
        for role, spec in policies.items()
    }
    assert opened == {
        "prefill": [[7071, 21000], [engine], [9471]],
        "decode": [[21000], sorted([7070, engine]), [9470]],
        "front": [[8000]],
    }


def test_pods_go_where_they_are_told(charts: dict[str, list[Document]]) -> None:
    """By default a role's replicas go to nodes of their own, and GPU pods to nodes that are kept for GPUs."""
    told = {
        "nodeSelector": {"pool": "kv"},
        "tolerations": [{"key": "kv", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    }
    for name, template in all_pods(rendered(dict.fromkeys(("prefill", "decode", "front"), told))):
        assert {key: template["spec"][key] for key in told} == told, name
    for example in EXAMPLES:
        for _, template in pods(charts[example]):
            tolerated = {each["key"] for each in template["spec"].get("tolerations", ())}
            assert ("nvidia.com/gpu" in tolerated) == example.startswith("vllm")
            assert "podAntiAffinity" in template["spec"]["affinity"]


def test_images_are_named_by_their_digest_where_one_is_given(charts: dict[str, list[Document]]) -> None:
    digest = "sha256:" + 64 * "0"
    images = {c["image"] for _, t in pods(charts["tls"]) for c in containers(t)}
    assert images == {f"registry.example/kvferry@{digest}"}
    assert {c["image"] for _, t in pods(charts["vllm-plugin"]) for c in containers(t)} == {
        "kvferry:cuda",
        "kvferry-vllm:cuda",
    }


def test_the_alerts_are_those_of_prometheus(charts: dict[str, list[Document]]) -> None:
    wanted = (CHART.parents[1] / "prometheus" / "kvferry.rules.yaml").read_text()
    assert (CHART / "files" / "kvferry.rules.yaml").read_text() == wanted
    for example, base in (("tls", "https://docs.example/kvferry/"), ("vllm-dra", "")):
        (rule,) = of_kind(charts[example], "PrometheusRule")
        assert rule["spec"] == yaml.safe_load(wanted.replace("runbook_url: ", f"runbook_url: {base}"))


def test_certificates_have_the_names_that_each_side_expects(charts: dict[str, list[Document]]) -> None:
    documents = charts["tls"]
    made = {d["spec"]["secretName"]: d["spec"] for d in of_kind(documents, "Certificate")}
    for _, template in pods(documents):
        config = config_of(daemon_of(template))
        secret = next(v["secret"]["secretName"] for v in template["spec"]["volumes"] if v["name"] == "tls")
        assert secret in made
        other = "decode" if config.role == "prefill" else "prefill"
        assert list(config.tls_peers) == made[f"{RELEASE}-{other}-tls"]["dnsNames"]
        if config.role == "decode":
            assert [parse_address(config.peer_service)[0]] == made[f"{RELEASE}-prefill-tls"]["dnsNames"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"image": {"digest": "sha256:12"}}, "digest"),
        ({"decode": {"replicas": 0}}, "replicas"),
        ({"decode": {"poolBytes": "2GiB"}}, "poolBytes"),
        ({"engine": {"kind": "sglang"}}, "kind"),
        ({"engine": {"kind": "vllm"}}, "model"),
        ({"gpu": {"by": "mps"}}, "by"),
        ({"frontend": {}}, "frontend"),
        ({"front": {"service": {"type": "Ingress"}}}, "type"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(wrong: Document, message: str) -> None:
    with helm.Chart.load(str(CHART)) as chart, pytest.raises(Exception, match=message):
        chart.render(wrong, name=RELEASE, namespace="kvferry")


def test_the_schema_knows_every_value() -> None:
    schema: Any = json.loads((CHART / "values.schema.json").read_text())

    def resolved(part: Any) -> Any:
        return schema["definitions"][part["$ref"].rpartition("/")[2]] if "$ref" in part else part

    def check(given: Any, part: Any, where: str) -> None:
        part = resolved(part)
        if isinstance(given, dict) and part.get("additionalProperties") is False:
            for name, value in given.items():
                assert name in part["properties"], f"{where}.{name}"
                check(value, part["properties"][name], f"{where}.{name}")

    check(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "values")
