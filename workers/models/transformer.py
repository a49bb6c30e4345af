"""A causal language model of transformers, its facts, and its computation over pool pages."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.utils.logging import disable_progress_bar

from kvferry.client.rank_pools import RankPools, settle_each
from kvferry.proto import common_pb2
from kvferry.transfer.geometry.kv_geometry import CacheShape, KVGeometry
from kvferry.workers.models.interface import Prompt, Step
from kvferry.workers.models.paged_batch import PagedBatch
from kvferry.workers.models.paged_cache import PagedCache, PageTable, RankView, rank_views
from kvferry.workers.models.sampling import Sampling, sample

UNBOUNDED_TOKENS = 1 << 20  # where a model's configuration names no length
WEIGHT_FILES = "*.safetensors"  # others may run code as they are loaded

_INDEXED = getattr(cache_utils, "DynamicIndexedLayer", DynamicLayer)  # of a sparse attention; older versions lack it
_HASH_CHUNK = 4 * 1024 * 1024


class KVShape(NamedTuple):
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str  # torch's name
    tensors: int = 2  # K and V, or 1: a latent that is both
    further: tuple[CacheShape, ...] = ()  # of an indexer

    @property
    def token_bytes(self) -> int:
        return KVGeometry(*self[:4], page_size=1, tensors=self.tensors, further=self.further).token_bytes


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, and what it says of itself."""

    network: Any  # a transformers causal model in evaluation mode
    fingerprint: str
    revision: str
    shape: KVShape
    vocabulary: int
    max_tokens: int

    @property
    def geometry(self) -> common_pb2.Geometry:
        """Page size and layout are left to the daemon."""
        shape = self.shape
        return common_pb2.Geometry(
            layers=shape.layers,
            kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype=shape.dtype,
            tensors=shape.tensors,
            further=[cache.to_proto() for cache in shape.further],
        )

    @property
    def device(self) -> torch.device:
        """The device that its weights are on."""
        return next(self.network.parameters()).device  # type: ignore[no-any-return]

    def compute(self, pools: RankPools) -> ModelCompute:
        """The computation over the ranks' pools, in one process: arrays on the CPU, else tensors on the model's kind of
        device.

        Raises ValueError when their geometry is not the model's, or they are elsewhere.
        """
        geometry = pools.geometry
        first = geometry.layers, geometry.kv_heads, geometry.head_dim, geometry.dtype, geometry.tensors
        if (given := KVShape(*first, geometry.further)) != self.shape:
            raise ValueError(f"geometry is {given}; the model's is {self.shape}")
        ranks = rank_views(pools)
        for number, rank in enumerate(ranks):
            if rank.device.type != self.device.type:
                raise ValueError(
                    f"rank {number}'s pool is on {rank.device}, the model on {self.device}; give it --device"
                )
        return ModelCompute(self, ranks, geometry.page_size, rank_views(pools, 1) if geometry.further else [])


def load_model(folder: Path, *, dtype: str, threads: int, revision: str = "", device: str = "cpu") -> LoadedModel:
    """Loads a causal model saved by transformers. `revision` empty: a SHA-256 over its weight files.

    Raises OSError when the folder cannot be read, ValueError when the model's cache is not plain attention,
    RuntimeError when there is no such device.
    """
    if not (folder / "config.json").is_file():
        raise ValueError(f"model: {folder} has no config.json; it must be a folder that transformers saved")
    torch.set_num_threads(threads)
    if not sys.stderr.isatty():  # in a log file a bar is noise
        disable_progress_bar()  # type: ignore[no-untyped-call]
    network: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), local_files_only=True, use_safetensors=True
    )
    return loaded(network.to(device), folder_fingerprint(folder), revision or weights_revision(folder))


def loaded(network: Any, fingerprint: str, revision: str) -> LoadedModel:
    """The model with its facts, once it is in memory."""
    network.eval()
    config = network.config.get_text_config(decoder=True)
    return LoadedModel(
        network=network,
        fingerprint=fingerprint,
        revision=revision,
        shape=kv_shape(network),
        vocabulary=network.get_input_embeddings().num_embeddings,
        max_tokens=getattr(config, "max_position_embeddings", None) or UNBOUNDED_TOKENS,
    )


def kv_shape(network: Any) -> KVShape:
    """The shape of the model's KV, from one computed token. Raises ValueError when pages cannot hold it."""
    cache = DynamicCache(config=network.config)
    with torch.inference_mode():
        first = torch.zeros((1, 1), dtype=torch.int64, device=next(network.parameters()).device)
        network(input_ids=first, past_key_values=cache, use_cache=True)
    shapes = set()
    indexes: set[tuple[int, str]] = set()
    for index, layer in enumerate(cache.layers):
        if type(layer) not in (DynamicLayer, _INDEXED) or not isinstance(layer, DynamicLayer):
            raise ValueError(
                f"model: layer {index} keeps a {type(layer).__name__}; pages hold only those of full attention"
            )
        assert layer.keys is not None
        assert layer.values is not None
        shapes.add((tuple(layer.keys.shape), tuple(layer.values.shape), layer.keys.dtype, layer.values.dtype))
        found = getattr(layer, "indexer_keys", None)
        indexes.add((0, "") if found is None else (int(found.shape[-1]), _name(found.dtype)))
    if len(shapes) != 1:
        raise ValueError(f"model: its layers' keys and values differ in shape: {sorted(map(str, shapes))}")
    if len(indexes) != 1:
        raise ValueError(f"model: its layers' indexers differ, by values and type of a key: {sorted(indexes)}")
    keys, values, dtype, _ = shapes.pop()
    layers, (width, index_dtype) = len(cache.layers), indexes.pop()
    further = (CacheShape(layers, 1, width, index_dtype, 1),) if width else ()
    if keys == values:
        return KVShape(layers, keys[1], keys[3], _name(dtype), further=further)
    if keys[1] != 1 or values[1] != 1:
        raise ValueError(f"model: keys are {keys}, values {values}; pages hold equal shapes only, or one latent")
    return KVShape(layers, 1, keys[3] + values[3], _name(dtype), 1, further)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def folder_fingerprint(folder: Path) -> str:
    """Model type and a hash of the configuration: the same for every copy of the model."""
    config = json.loads((folder / "config.json").read_text())
    # written by whichever version saved it; they change nothing that is computed
    for key in ("transformers_version", "_name_or_path", "dtype", "torch_dtype"):
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    return f"{config.get('model_type', 'unknown')}-{digest[:32]}"


def weights_revision(folder: Path) -> str:
    """SHA-256 over the weight files' names and contents: two fine-tunings of a model have files of the same size."""
    files = sorted(folder.glob(WEIGHT_FILES))
    if not files:
        raise ValueError(f"model: {folder} has no weight files ({WEIGHT_FILES})")
    total = hashlib.sha256()
    for path in files:
        content = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(_HASH_CHUNK):
                content.update(chunk)
        total.update(f"{path.name}:{content.hexdigest()}\n".encode())
    return total.hexdigest()


class ModelCompute:
    """The model over a pool, as a `Compute`."""

    def __init__(
        self, model: LoadedModel, ranks: list[RankView], page_size: int, index: Sequence[RankView] = ()
    ) -> None:
        """index: of the indexer's cache, where there is one."""
        self._model = model
        self._ranks = ranks
        self._page_size = page_size
        self._index = index

    @property
    def vocabulary(self) -> int:
        return self._model.vocabulary

    def sequence(
        self,
        prompt: Prompt,
        pages: Sequence[int],
        sampling: Sampling,
        *,
        shared_tokens: int,
        asked: Prompt | None = None,
    ) -> ModelSequence:
        table = PageTable(self._page_size, pages, shared_tokens=shared_tokens, device=self._model.device)
        return ModelSequence(self._model.network, self._ranks, table, prompt, sampling, self._index)

    def steps(self, steps: Sequence[Step]) -> list[int]:
        """See `BatchCompute`."""
        if len(steps) == 1 or self._index:  # an indexer has no mask for requests of unlike lengths
            return [step.sequence.step(step.token, step.position) for step in steps]
        sequences = [step.sequence for step in steps]
        mine = [sequence for sequence in sequences if isinstance(sequence, ModelSequence)]
        assert len(mine) == len(sequences), "a step of another model's sequence"
        with settled_on_error(self._ranks):
            step_together(self._model.network, self._ranks, mine, steps)
            return [sequence.first_token() for sequence in mine]


class ModelSequence:
    """One request, as a `SequenceCompute`."""

    def __init__(
        self,
        network: Any,
        ranks: list[RankView],
        table: PageTable,
        prompt: Prompt,
        sampling: Sampling,
        index: Sequence[RankView] = (),
    ) -> None:
        self._network = network
        self._ranks = ranks
        self._index = index
        self._table = table
        self._tokens = torch.from_numpy(prompt.tokens.astype(np.int64)).unsqueeze(0).to(table.pages.device)
        self._sampling = sampling
        self._cache = PagedCache(ranks, table, tokens=0, index=index)
        self._logits: torch.Tensor | None = None

    def add_pages(self, pages: Sequence[int]) -> None:
        self._table.add(pages)

    def resume(self, tokens: int) -> None:
        self._cache = PagedCache(self._ranks, self._table, tokens=tokens, index=self._index)

    def prompt(self, start: int, end: int) -> None:
        with settled(self._ranks):
            self._forward(self._tokens[:, start:end], start)

    def first_token(self) -> int:
        return self._next()

    def check_first_token(self, token: int) -> None:
        """Only the prefill worker has the logits."""

    def step(self, token: int, position: int) -> int:
        with settled_on_error(self._ranks):
            self._forward(torch.tensor([[token]], device=self._tokens.device), position)
            if len(self._ranks) > 1:
                settle(self._ranks)  # not every rank is read for the token
            return self._next()

    @property
    def cache(self) -> PagedCache:
        """The KV of what is computed."""
        return self._cache

    def give(self, logits: torch.Tensor) -> None:
        """Takes the logits of the next token, (vocabulary,), computed elsewhere."""
        self._logits = logits

    def finish(self) -> None:
        """Nothing to check: a model cannot tell whose bytes a page holds."""

    @torch.inference_mode()
    def _forward(self, tokens: torch.Tensor, position: int) -> None:
        assert self._cache.get_seq_length() == position, f"{self._cache.get_seq_length()} tokens; position {position}"
        output = self._network(input_ids=tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        self._logits = output.logits[0, -1]

    @torch.inference_mode()
    def _next(self) -> int:
        assert self._logits is not None
        return sample(self._logits, self._sampling, self._cache.get_seq_length())


def settle(ranks: Sequence[RankView]) -> None:
    """Waits until what was computed is in the pages: the daemon may read them once it is told so. Reading a token waits
    for that, and for all before it, where the pages are on one device."""
    devices = (rank.device for rank in ranks if rank.device.type == "cuda")
    settle_each(devices, lambda device: torch.cuda.current_stream(device).record_event().synchronize())


@contextmanager
def settled(ranks: Sequence[RankView]) -> Iterator[None]:
    """Settles the ranks however the block ends: what it has begun to compute writes the pages no more when it is left:
    a request that fails is given up at the daemon next, which gives its pages to others."""
    try:
        yield
    finally:
        settle(ranks)


@contextmanager
def settled_on_error(ranks: Sequence[RankView]) -> Iterator[None]:
    """Settles as `settled` does, for a block that waits for all that it computes where it ends well."""
    try:
        yield
    except BaseException:
        settle(ranks)
        raise


@torch.inference_mode()
def step_together(
    network: Any, ranks: Sequence[RankView], sequences: Sequence[ModelSequence], steps: Sequence[Step]
) -> None:
    """One forward pass; each sequence then has the logits of its next token."""
    for sequence, step in zip(sequences, steps, strict=True):
        held = sequence.cache.get_seq_length()
        assert held == step.position, f"{held} tokens; position {step.position}"
    batch = PagedBatch(ranks, [sequence.cache for sequence in sequences])
    output = network(
        input_ids=torch.tensor([[step.token] for step in steps], device=batch.positions.device),
        position_ids=batch.positions,
        attention_mask=batch.mask(network.dtype),
        past_key_values=batch,
        use_cache=True,
    )
    batch.end()
    if len(ranks) > 1:
        settle(ranks)  # not every rank is read for the tokens
    for sequence, logits in zip(sequences, output.logits, strict=True):
        sequence.give(logits[-1])
