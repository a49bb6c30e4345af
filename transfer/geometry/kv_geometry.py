"""The shape of a page of KV on one rank, and where its bytes lie."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field, replace

from kvferry.proto import common_pb2 as common

# Bytes of an element, by torch's name: pages are moved, never computed with, so that the size is all that is asked for.
_NAMES = {
    1: "bool int8 uint8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2",
    2: "float16 bfloat16 int16 uint16",
    4: "float32 int32 uint32 complex32",
    8: "float64 int64 uint64 complex64",
    16: "complex128",
}
ITEMSIZES = {name: size for size, names in _NAMES.items() for name in names.split()}
MAX_PAGE_BYTES = 1 << 30
MAX_CACHES = 8  # of a page


class Layout(enum.IntEnum):
    """The order of a page's bytes; all are page-major (a page is one contiguous row)."""

    PAGE_NHD = common.LAYOUT_PAGE_NHD  # (layer, K or V, token, head, head dimension)
    PAGE_HND = common.LAYOUT_PAGE_HND  # (layer, K or V, head, token, head dimension)
    ENGINE = common.LAYOUT_ENGINE  # inside as the engine has it: nobody else may change a part of a page


class StorageOrder(enum.IntEnum):
    """The order of a rank's memory."""

    PAGE_MAJOR = common.STORAGE_PAGE_MAJOR  # (page, layer, K or V, ...): a page is one contiguous row
    LAYER_MAJOR = common.STORAGE_LAYER_MAJOR  # (layer, K or V, page, ...): a tensor for each K and each V of a layer
    LAYER_BLOCKS = common.STORAGE_LAYER_BLOCKS  # (layer, page, K or V, ...): one tensor a layer, as some engines have


@dataclass(frozen=True, slots=True)
class CacheShape:
    """A further cache of the same tokens in the same pages: an indexer's keys beside a latent, or layers of unlike
    size. The fields are those of `KVGeometry`, which judges them."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str
    tensors: int = 2

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.tensors} x {self.kv_heads} x {self.head_dim} {self.dtype[:64]}"

    def to_proto(self) -> common.CacheShape:
        return common.CacheShape(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            tensors=self.tensors,
        )

    @staticmethod
    def from_proto(message: common.CacheShape) -> CacheShape:
        """`tensors` 0 means 2."""
        return CacheShape(message.layers, message.kv_heads, message.head_dim, message.dtype, message.tensors or 2)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """`page_size` tokens over all layers, in one cache or in several, one behind the other.

    The fields are those of the first cache, and what all have in common; `caches` has each by itself. Of one cache
    alone, a page is `fragments` runs of equal length in which the tokens follow each other."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # torch's name
    page_size: int  # tokens
    layout: Layout = Layout.PAGE_NHD
    tensors: int = 2  # a layer: K and V, or 1 where both are one (MLA)
    # Of Layout.ENGINE: (layer, run, head, ...) is the order of a page, each head's run as the engine has it; 0: it is
    # another one. How pages can be cut, not which are equal: that is the engine layout's name.
    head_runs: int = field(default=0, compare=False)  # a layer: 1, K and V together, or `tensors`
    further: tuple[CacheShape, ...] = ()  # caches behind the first

    def __post_init__(self) -> None:
        """ValueError names the field, its value and the bound."""
        for name, value, low, high in (
            ("page_size", self.page_size, 1, 4096),
            ("head_runs", self.head_runs, 0, self.tensors if self.layout is Layout.ENGINE else 0),
            ("further, the number of entries,", len(self.further), 0, MAX_CACHES - 1),
        ):
            if not low <= value <= high:
                raise ValueError(f"geometry.{name} is {value}; it must be {low} to {high}")
        _check_shape("geometry", self)
        for number, cache in enumerate(self.further):
            _check_shape(f"geometry.further[{number}]", cache)
        if self.page_bytes > MAX_PAGE_BYTES:
            raise ValueError(f"geometry: a page has {self.page_bytes} bytes; the bound is {MAX_PAGE_BYTES}")

    @property
    def caches(self) -> tuple[KVGeometry, ...]:
        """Each cache by itself, in the order of a page's bytes."""
        first = replace(self, further=()) if self.further else self
        return (first, *map(self._alone, self.further))

    def _alone(self, cache: CacheShape) -> KVGeometry:
        """One of `further`, whose heads lie in as many runs as the first cache's."""
        return KVGeometry(
            layers=cache.layers,
            kv_heads=cache.kv_heads,
            head_dim=cache.head_dim,
            dtype=cache.dtype,
            page_size=self.page_size,
            layout=self.layout,
            tensors=cache.tensors,
            head_runs=min(self.head_runs, cache.tensors),
        )

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers of all caches."""
        caches: tuple[KVGeometry | CacheShape, ...] = (self, *self.further)
        return sum(
            cache.layers * cache.tensors * cache.kv_heads * cache.head_dim * ITEMSIZES[cache.dtype] for cache in caches
        )

    @property
    def page_bytes(self) -> int:
        return self.token_bytes * self.page_size

    @property
    def runs_of_a_head(self) -> int:
        """Runs of bytes that each head has in a layer of a page, those of all heads one behind the other; 0: a token's
        heads lie side by side, or only the engine knows."""
        return self.tensors if self.layout is Layout.PAGE_HND else self.head_runs

    @property
    def heads_first(self) -> bool:
        """Whether a head's tokens follow each other in K and in V, and not a token's heads."""
        return self.runs_of_a_head == self.tensors

    @property
    def fragments(self) -> int:
        """Runs of a page in which the tokens follow each other."""
        per_layer = self.tensors * (self.kv_heads if self.heads_first else 1)
        return self.layers * per_layer

    @property
    def fragment_token_bytes(self) -> int:
        """Bytes of one token in one fragment."""
        heads = 1 if self.heads_first else self.kv_heads
        return heads * self.head_dim * self.itemsize

    @property
    def fragment_bytes(self) -> int:
        return self.fragment_token_bytes * self.page_size

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """(layers, tensors, page_size, kv_heads, head_dim), or kv_heads before page_size where heads are first."""
        if self.heads_first:
            return (self.layers, self.tensors, self.kv_heads, self.page_size, self.head_dim)
        return (self.layers, self.tensors, self.page_size, self.kv_heads, self.head_dim)

    def to_proto(self) -> common.Geometry:
        return common.Geometry(
            layers=self.layers,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            page_size=self.page_size,
            layout=common.Layout.Name(int(self.layout)),
            tensors=self.tensors,
            head_runs=self.head_runs,
            further=[cache.to_proto() for cache in self.further],
        )

    @staticmethod
    def from_proto(message: common.Geometry) -> KVGeometry:
        """ValueError names the field, its value and the bound. `tensors` 0 means 2, an unspecified layout PAGE_NHD."""
        layout = message.layout or common.LAYOUT_PAGE_NHD
        if int(layout) not in {int(known) for known in Layout}:
            raise ValueError(f"geometry.layout is {layout}; it must be one of {[int(known) for known in Layout]}")
        further = message.further[:MAX_CACHES]  # one too many is refused by its number
        return KVGeometry(
            layers=message.layers,
            kv_heads=message.kv_heads,
            head_dim=message.head_dim,
            dtype=message.dtype,
            page_size=message.page_size,
            layout=Layout(layout),
            tensors=message.tensors or 2,
            head_runs=message.head_runs,
            further=tuple(CacheShape.from_proto(cache) for cache in further),
        )


def _check_shape(field: str, shape: KVGeometry | CacheShape) -> None:
    if shape.dtype not in ITEMSIZES:
        raise ValueError(f"{field}.dtype is {shape.dtype[:64]!r}; it must be one of {', '.join(ITEMSIZES)}")
    for name, value, low, high in (
        ("layers", shape.layers, 1, 1024),
        ("kv_heads", shape.kv_heads, 1, 4096),
        ("head_dim", shape.head_dim, 1, 1 << 16),
        ("tensors", shape.tensors, 1, 2),
    ):
        if not low <= value <= high:
            raise ValueError(f"{field}.{name} is {value}; it must be {low} to {high}")
