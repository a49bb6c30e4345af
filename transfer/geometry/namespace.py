"""The facts that two caches must share for their pages to be interchangeable, and the id that stands for them on the
wire."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass

from kvferry.proto import common_pb2 as common
from kvferry.transfer.geometry.kv_geometry import KVGeometry, Layout

MAX_TEXT = 512
DIGEST_BYTES = 32

_REMEDIES = {
    "model": "serve the same model on both sides",
    "revision": "serve the same weights on both sides",
    "digest_algorithm": "put engines that name pages by the same chain on both sides (vLLM's and SGLang's differ)",
    "root_digest": "give the digest chains of both engines the same root",
    "tenant_salt_digest": "give both workers the same --tenant-salt",
    "geometry.page_size": "start both daemons with the same --page-size",
    "geometry.dtype": "start both workers with the same --dtype, both engines with the same --kv-cache-dtype",
    "geometry.layout": "configure the same page layout on both sides",
    "geometry.head_runs": "install the same connector on both sides",
    "geometry.further": "serve the same model on both sides, with the same kvferry: an older one knows one cache alone",
    "engine_layout": "run the same engine on the same kind of processor, with the same order within a block (GPUs: "
    "VLLM_KV_CACHE_LAYOUT; CPUs: --block-size) and --kv-cache-dtype on both sides",
    "digest_tokens": "give both engines the same hash block size",
    "kv_scales": "serve a checkpoint with the same scales of the KV cache on both sides",
    "speculative": "give both engines the same --speculative-config, and install the same kvferry",
}
_LATER = ("geometry.further", "engine_layout", "digest_tokens", "kv_scales", "speculative")
_UNSAID = "geometry.head_runs"  # by older engines, of bytes that `engine_layout` names: 0 differs from nothing
_EXPLAINS = ("model", "revision", "kv_scales", "speculative")  # a draft model has layers, and the geometry counts them
_SAME_MODEL = "serve the same model with the same parallelism on both sides"


@dataclass(frozen=True, slots=True)
class NamespaceFacts:
    """Model, weights, geometry, digest chain and tenant: pages match only where all are equal."""

    model: str  # fingerprint
    revision: str  # of the weights
    geometry: KVGeometry
    digest_algorithm: str
    root_digest: bytes  # parent of first pages
    tenant_salt_digest: bytes = b""  # SHA-256 of the salt; empty without one
    engine_layout: str = ""  # of Layout.ENGINE: names the order of a page's bytes
    digest_tokens: int = 0  # of a digest of the chain, where that is not a page; a page's digest is its last one's
    kv_scales: str = ""  # names those of quantized KV; empty: it has none, or all are 1
    speculative: str = ""  # names the draft model whose KV lies in the pages; empty: there is none

    def __post_init__(self) -> None:
        """ValueError names the field, its value and the bound."""
        for name in ("model", "revision", "digest_algorithm"):
            length = len(getattr(self, name))
            if length > MAX_TEXT or (length == 0 and name != "revision"):
                raise ValueError(f"facts.{name} has {length} characters; it must have 1 to {MAX_TEXT}")
        if len(self.root_digest) != DIGEST_BYTES:
            raise ValueError(f"facts.root_digest has {len(self.root_digest)} bytes; it must have {DIGEST_BYTES}")
        if len(self.tenant_salt_digest) not in (0, DIGEST_BYTES):
            length = len(self.tenant_salt_digest)
            raise ValueError(f"facts.tenant_salt_digest has {length} bytes; it must have 0 or {DIGEST_BYTES}")
        least = 1 if self.geometry.layout is Layout.ENGINE else 0
        if not least <= len(self.engine_layout) <= MAX_TEXT:
            raise ValueError(
                f"facts.engine_layout has {len(self.engine_layout)} characters; with layout "
                f"{self.geometry.layout.name} it must have {least} to {MAX_TEXT}"
            )
        for name in ("kv_scales", "speculative"):
            if (length := len(getattr(self, name))) > MAX_TEXT:
                raise ValueError(f"facts.{name} has {length} characters; it must have at most {MAX_TEXT}")
        if self.digest_tokens and self.geometry.page_size % self.digest_tokens:
            raise ValueError(
                f"facts.digest_tokens is {self.digest_tokens}; it must divide the page size, {self.geometry.page_size}"
            )

    @property
    def id(self) -> bytes:
        """SHA-256 over every field with its name and length, 32 bytes; what came later counts only where it is set,
        and how pages are cut not at all."""
        sha = hashlib.sha256(b"kvferry-namespace-1")
        for name, value in _flat(self):
            if name == _UNSAID or (name in _LATER and not value):
                continue
            data = value if isinstance(value, bytes) else str(value).encode()
            sha.update(f"\n{name}:{len(data)}:".encode() + data)
        return sha.digest()

    def to_proto(self) -> common.NamespaceFacts:
        return common.NamespaceFacts(
            model=self.model,
            revision=self.revision,
            geometry=self.geometry.to_proto(),
            digest_algorithm=self.digest_algorithm,
            root_digest=self.root_digest,
            tenant_salt_digest=self.tenant_salt_digest,
            engine_layout=self.engine_layout,
            digest_tokens=self.digest_tokens,
            kv_scales=self.kv_scales,
            speculative=self.speculative,
        )

    @staticmethod
    def from_proto(message: common.NamespaceFacts) -> NamespaceFacts:
        """ValueError names the field, its value and the bound."""
        return NamespaceFacts(
            model=message.model,
            revision=message.revision,
            geometry=KVGeometry.from_proto(message.geometry),
            digest_algorithm=message.digest_algorithm,
            root_digest=message.root_digest,
            tenant_salt_digest=message.tenant_salt_digest,
            engine_layout=message.engine_layout,
            digest_tokens=message.digest_tokens,
            kv_scales=message.kv_scales,
            speculative=message.speculative,
        )


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two sides differ."""

    field: str
    ours: str
    theirs: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.field} is {self.ours} here and {self.theirs} there; {self.remedy}"


def differences(ours: NamespaceFacts, theirs: NamespaceFacts) -> list[Difference]:
    """All fields in which the two differ, in the order of the declaration: those first that explain others."""
    pairs = zip(_flat(ours), _flat(theirs), strict=True)
    found = [
        Difference(name, _shown(own), _shown(other), _REMEDIES.get(name, _SAME_MODEL))
        for (name, own), (_, other) in pairs
        if own != other and (name != _UNSAID or (own and other))
    ]
    return sorted(found, key=lambda difference: difference.field not in _EXPLAINS)


def _flat(facts: NamespaceFacts) -> list[tuple[str, object]]:
    fields: list[tuple[str, object]] = []
    for field in dataclasses.fields(facts):
        value = getattr(facts, field.name)
        if isinstance(value, KVGeometry):
            fields += [(f"geometry.{part.name}", getattr(value, part.name)) for part in dataclasses.fields(value)]
        else:
            fields.append((field.name, value))
    return [(name, _plain(value)) for name, value in fields]


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return value.name if hasattr(value, "name") else value


def _shown(value: object) -> str:
    return (value.hex()[:16] if isinstance(value, bytes) else str(value)) or "none"
