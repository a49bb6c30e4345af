"""The overlays of deploy/kubernetes."""

from __future__ import annotations

import pytest

from tests.deploy.manifests import OVERLAYS, Document, rendered


@pytest.fixture(scope="module")
def overlays() -> dict[str, list[Document]]:
    return {overlay: rendered(overlay) for overlay in OVERLAYS}
