"""deploy/kubernetes as kustomize renders it, and the daemons in it."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvferry.daemon.cli import serve
from kvferry.daemon.config import sources as config_sources
from kvferry.daemon.config.model import DaemonConfig

KUBERNETES = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
OVERLAYS = ("plain", "cpu", "gpu", "gpu-plugin", "rdma", "node")
TLS_OVERLAYS = tuple(overlay for overlay in OVERLAYS if overlay != "plain")
Document = dict[str, Any]


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


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    return [document for document in documents if document["kind"] == kind]


def all_pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """(name, pod template) of every workload."""
    for document in documents:
        if document["kind"] in ("StatefulSet", "Deployment", "DaemonSet"):
            yield document["metadata"]["name"], document["spec"]["template"]


def pods(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    """Those with a daemon."""
    for name, template in all_pods(documents):
        if "kvferry/role" in template["metadata"]["labels"]:
            yield name, template


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
