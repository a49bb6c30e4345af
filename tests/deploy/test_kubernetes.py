"""deploy/kubernetes, as kustomize renders it: schemas, and the "restricted" pod security standard."""

from __future__ import annotations

import re

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deploy.manifest_schemas import SPECS, VERSION, check_schema
from tests.deploy.manifests import KUBERNETES, OVERLAYS, Document, all_pods, of_kind
from tests.deploy.restricted import beyond_restricted

RULES = KUBERNETES.parent / "prometheus" / "kvferry.rules.yaml"


# -- schemas ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_object_keeps_to_its_schema(overlays: dict[str, list[Document]], overlay: str) -> None:
    for document in overlays[overlay]:
        check_schema(document)
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
        for rule in of_kind(documents, "PrometheusRule"):
            assert rule["spec"]["groups"] == yaml.safe_load(RULES.read_text())["groups"]


# -- what pods may do -------------------------------------------------------------------------------------------------


EXTRA_RIGHTS = {overlay: {"volume hostPath"} if overlay == "node" else set() for overlay in OVERLAYS}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pods_keep_to_the_restricted_standard(overlays: dict[str, list[Document]], overlay: str) -> None:
    found = [beyond_restricted(template) for _, template in all_pods(overlays[overlay])]
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
