"""Schemas of the Prometheus operator's and cert-manager's resources.

What is used of them, no more: a key that is misspelt is refused.
"""

from __future__ import annotations

import jsonschema
import kubernetes_validate

from tests.deploy.manifests import Document

VERSION = "1.36"
OTHERS = ("monitoring.coreos.com/v1", "cert-manager.io/v1")

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


def check_schema(document: Document) -> None:
    """ValidationError where a key or a value is not of its kind."""
    if document["apiVersion"] in OTHERS:
        jsonschema.validate(document["spec"], {"type": "object", **SPECS[document["kind"]]})
    else:
        kubernetes_validate.validate(document, VERSION, strict=True)
