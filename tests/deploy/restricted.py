"""The "restricted" pod security standard, as far as pod templates can leave it."""

from __future__ import annotations

from tests.deploy.manifests import Document, containers


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
        ours = not container.get("image", "").startswith("kvferry-vllm")
        assert context.get("readOnlyRootFilesystem") is True or not ours  # beyond the standard
    return found
