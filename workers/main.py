"""`kvferry worker prefill|decode`: a reference worker around a transformer, or around nothing (`--synthetic`)."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from kvferry import flags, listening, tracing
from kvferry.byte_tokens import SYNTHETIC
from kvferry.client.client import DaemonClient
from kvferry.client.engine_pools import STORAGES, EnginePools, MakePools, PoolSpec, make_files, parse_devices
from kvferry.logs import LOG_FORMAT
from kvferry.proto import common_pb2
from kvferry.radix.digests import root_digest
from kvferry.secret_files import ApiKeys
from kvferry.workers.models.engine_model import EngineModel, read_engine_model
from kvferry.workers.models.interface import Compute
from kvferry.workers.models.pacing import ModelPace, Pace
from kvferry.workers.models.synthetic import SimulatedTime, SyntheticCompute
from kvferry.workers.server import WorkerConfig, serve

DTYPES = ("float32", "bfloat16", "float16")
GPU_BATCH = 64
MAX_CLOCK = 1000
SYNTHETIC_MAX_TOKENS = 1 << 20
LAYOUTS = {
    "nhd": common_pb2.LAYOUT_PAGE_NHD,
    "hnd": common_pb2.LAYOUT_PAGE_HND,
    "engine-nhd": common_pb2.LAYOUT_ENGINE,
    "engine-hnd": common_pb2.LAYOUT_ENGINE,
}

_log = logging.getLogger(__name__)

_ROLES = {"prefill": common_pb2.ROLE_PREFILL, "decode": common_pb2.ROLE_DECODE}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Help shows them in this order."""
    _add_connection(parser)
    _add_work(parser)
    _add_process(parser)
    _add_pool(parser)
    _add_model(parser)
    _add_synthetic(parser)


def _add_connection(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of its role, its daemon, and its name to both sides."""
    parser.add_argument("role", choices=sorted(_ROLES))
    parser.add_argument("--socket", required=True, metavar="PATH", help="the daemon's Unix socket")
    parser.add_argument(
        "--listen", type=listening.listen, required=True, metavar="HOST:PORT", help="for front ends; port 0: any"
    )
    listening.add_insecure_argument(parser)
    parser.add_argument(
        "--api-keys", metavar="FILE", help="tokens of front ends (--engine-token), one a line (default: none needed)"
    )
    parser.add_argument("--name", default="", help="for the daemon's logs (default: role and process id)")
    parser.add_argument("--tenant-salt", default="", help="caches are shared only between workers with the same salt")


def _add_work(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of what it takes, computes and sends at a time."""
    parser.add_argument("--chunk-tokens", type=flags.whole, default=256, metavar="N", help="of a prompt at once")
    parser.add_argument("--max-tokens", type=flags.whole, metavar="N", help="prompt + output (default: the model's)")
    parser.add_argument("--max-requests", type=flags.whole, default=1024, metavar="N", help="at a time")
    parser.add_argument(
        "--local-prefill-max-tokens",
        type=flags.whole_or_0,
        default=0,
        metavar="N",
        help="decode: an unmatched part this short needs no prefill server",
    )
    parser.add_argument(
        "--max-running",
        type=flags.whole_or_0,
        default=0,
        metavar="N",
        help="decode: with the daemon at a time (0: any number)",
    )
    parser.add_argument(
        "--max-batch",
        type=flags.whole,
        metavar="N",
        help=f"decode: steps that a model computes together (default: 1, on a GPU {GPU_BATCH})",
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="FILE",
        help="of each request that a model computes a JSON line: its tokens, and sums over its pages' bytes",
    )
    parser.add_argument(
        "--stream-interval", type=flags.whole, default=1, metavar="N", help="decode: tokens that are sent together"
    )


def _add_process(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of its start, its traces and its end."""
    parser.add_argument(
        "--connect-timeout", type=flags.positive, default=30.0, metavar="SECONDS", help="to wait for the daemon"
    )
    parser.add_argument(
        "--warmup",
        type=flags.whole_or_0,
        default=0,
        metavar="N",
        help="short requests of its own before it is ready, none of which enters the cache; a prefill worker's are "
        "counted as aborted by its daemon",
    )
    parser.add_argument("--otel", default="", metavar="URL", help=tracing.FLAG_HELP)
    parser.add_argument("--grace", type=flags.not_negative, default=30.0, metavar="SECONDS", help="after SIGTERM")


def _add_pool(parser: argparse.ArgumentParser) -> None:
    pool = parser.add_argument_group("pool", "what a worker of a daemon with --pool engine allocates itself")
    pool.add_argument("--pool", choices=("daemon", "engine"), default="daemon", help="whose memory the KV pool is")
    pool.add_argument("--pool-pages", type=flags.whole, default=1024, metavar="N", help="in it")
    pool.add_argument("--page-size", type=flags.whole, default=64, metavar="TOKENS", help="the daemon's")
    pool.add_argument(
        "--pool-device", default="cpu", metavar="cpu|cuda[:I],...", help="shared memory, or a GPU for each rank"
    )
    pool.add_argument("--ranks", type=flags.whole, metavar="N", help="the daemon's (default: one a device)")
    pool.add_argument("--storage", choices=tuple(STORAGES), default="layer", help="of each rank's memory")
    pool.add_argument("--shm-dir", default="/dev/shm", metavar="DIR", help="the daemon's")


def _add_model(parser: argparse.ArgumentParser) -> None:
    model = parser.add_argument_group("model")
    source = model.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="FOLDER", help="a causal language model as transformers saves it")
    source.add_argument(
        "--random-weights",
        metavar="SHAPE",
        help="an untrained model: llama-8b, llama-1b, qwen2.5-3b, tiny, or "
        "layers=N,hidden=N,heads=N,kv_heads=N,head_dim=N,intermediate=N[,vocabulary=128][,max_tokens=N]",
    )
    source.add_argument("--synthetic", action="store_true", help="no model: pages follow from their digests")
    source.add_argument("--engine", choices=("synthetic",), help="the same as --synthetic")
    model.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and KV")
    model.add_argument(
        "--device",
        type=flags.device,
        default="cpu",
        metavar="cpu|cuda[:N]",
        help="that computes; the daemon's pool is there too",
    )
    model.add_argument("--revision", default="", help="of the weights, instead of a hash of their files")
    model.add_argument("--threads", type=flags.whole, default=1, metavar="N", help="that compute")


def _add_synthetic(parser: argparse.ArgumentParser) -> None:
    synthetic = parser.add_argument_group("synthetic")
    synthetic.add_argument(
        "--engine-model", type=Path, metavar="FILE", help="wait as long as the engine of this JSON description would"
    )
    synthetic.add_argument("--clock", type=_clock, default=1.0, metavar="X", help="all its waits are X times shorter")
    synthetic.add_argument("--synthetic-layers", type=flags.whole, default=2, metavar="N")
    synthetic.add_argument("--synthetic-kv-heads", type=flags.whole, default=1, metavar="N")
    synthetic.add_argument("--synthetic-head-dim", type=flags.whole, default=16, metavar="N")
    synthetic.add_argument("--synthetic-tensors", type=int, choices=(1, 2), default=2, help="a layer: K and V, or one")
    synthetic.add_argument(
        "--synthetic-further",
        action="append",
        type=_further,
        default=[],
        metavar="SHAPE",
        help="a further cache of each page: layers=N,head_dim=N[,kv_heads=1][,tensors=1][,dtype=uint8]; again for more",
    )
    synthetic.add_argument("--synthetic-layout", choices=sorted(LAYOUTS), default="nhd", help="of a page's rows")
    synthetic.add_argument(
        "--synthetic-prefill-us", type=flags.not_negative, default=0.0, metavar="US", help="a prompt token takes"
    )
    synthetic.add_argument(
        "--synthetic-decode-us", type=flags.not_negative, default=0.0, metavar="US", help="a decode step takes"
    )


def run(args: argparse.Namespace) -> int:
    if not logging.getLogger().handlers:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr, format=LOG_FORMAT)
    if problem := listening.problem(args, "front ends come without TLS and without a login"):
        print(f"kvferry worker: {problem}", file=sys.stderr)
        return 2
    if why := listening.cannot_listen(*args.listen):  # before a model is loaded
        print(f"kvferry worker: --listen {args.listen}: {why}", file=sys.stderr)
        return 2
    args.synthetic = args.synthetic or args.engine is not None
    prepare = _prepare_synthetic if args.synthetic else _prepare_model
    try:
        config, make_compute = prepare(args)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: torch finds no such device, or no room there
        print(f"kvferry worker: {error}", file=sys.stderr)
        return 2
    try:
        tracing.configure("kvferry-worker", args.otel, **{"service.instance.id": config.name})
        return asyncio.run(serve(config, make_compute))
    except tracing.TracingError as error:
        print(f"kvferry worker: {error}", file=sys.stderr)
        return 2
    finally:
        tracing.shutdown()


Prepared = tuple[WorkerConfig, Callable[[DaemonClient], Compute]]


def _prepare_synthetic(args: argparse.Namespace) -> Prepared:
    for flag, value in (("--max-batch", args.max_batch), ("--record", args.record)):
        if value is not None:
            raise ValueError(f"{flag} is for a model; --synthetic computes nothing")
    if args.synthetic_layout == "engine-hnd" and any(
        s.tensors > args.synthetic_tensors for s in args.synthetic_further
    ):
        raise ValueError(
            "--synthetic-further has tensors=2, and --synthetic-tensors is 1: with --synthetic-layout engine-hnd K and "
            "V would be one run, which only an engine can look into"
        )
    geometry = common_pb2.Geometry(
        layers=args.synthetic_layers,
        kv_heads=args.synthetic_kv_heads,
        head_dim=args.synthetic_head_dim,
        dtype=args.dtype,
        tensors=args.synthetic_tensors,
        layout=LAYOUTS[args.synthetic_layout],
        head_runs=args.synthetic_tensors if args.synthetic_layout == "engine-hnd" else 0,
        further=args.synthetic_further,
    )
    simulated = SimulatedTime(args.synthetic_prefill_us / 1e6, args.synthetic_decode_us / 1e6)
    facts = _facts(args, "synthetic", args.revision or "1", geometry)
    if geometry.layout == common_pb2.LAYOUT_ENGINE:
        facts.engine_layout = f"synthetic {args.synthetic_layout}"
    config = _config(args, facts, tokenizer=SYNTHETIC, model_max_tokens=SYNTHETIC_MAX_TOKENS)
    if args.engine_model is not None:
        config = config._replace(make_pace=_pace_of(read_engine_model(args.engine_model), args.clock))
    return config, lambda client: SyntheticCompute(client.pools, simulated)


def _pace_of(model: EngineModel, clock: float) -> Callable[[DaemonClient], Pace]:
    def make(client: DaemonClient) -> Pace:
        geometry = client.geometry
        _log.info(
            "engine %s, clock x %g: pages of %d bytes stand for %d",
            model.name,
            clock,
            geometry.page_bytes,
            model.kv_bytes_per_token * geometry.page_size,
        )
        return ModelPace(model, clock=clock, token_bytes=geometry.token_bytes)

    return make


def _prepare_model(args: argparse.Namespace) -> Prepared:
    # torch takes seconds to import: not for --help, not for --synthetic
    import torch

    from kvferry.workers.models.random_weights import parse_shape, random_model
    from kvferry.workers.models.transformer import load_model
    from kvferry.workers.page_sums import FileRecord

    if args.engine_model is not None:
        raise ValueError("--engine-model is for --engine synthetic: a model takes its own time")
    if args.device != "cpu" and not torch.cuda.is_available():  # a build without CUDA would end in a traceback
        raise ValueError(f"--device is {args.device}, but torch {torch.__version__} finds no CUDA device here")
    if args.random_weights:
        shape = parse_shape(args.random_weights)
        model = random_model(shape, dtype=args.dtype, threads=args.threads, device=args.device)
        tokenizer = SYNTHETIC
    else:
        folder = Path(args.model)
        model = load_model(folder, dtype=args.dtype, threads=args.threads, revision=args.revision, device=args.device)
        tokenizer = str(folder.resolve())
    facts = _facts(args, model.fingerprint, args.revision or model.revision, model.geometry)
    config = _config(args, facts, tokenizer=tokenizer, model_max_tokens=model.max_tokens)
    on_gpu = model.device.type == "cuda"
    config = config._replace(max_batch=args.max_batch or (GPU_BATCH if on_gpu else 1))
    if args.record is not None:
        config = config._replace(make_record=lambda client: FileRecord(args.record, client.pools))
    return config, lambda client: model.compute(client.pools)


def _facts(
    args: argparse.Namespace, model: str, revision: str, geometry: common_pb2.Geometry
) -> common_pb2.NamespaceFacts:
    salt = args.tenant_salt.encode()
    return common_pb2.NamespaceFacts(
        model=model,
        revision=revision,
        geometry=geometry,
        digest_algorithm="sha256_cbor",
        root_digest=root_digest(),
        tenant_salt_digest=hashlib.sha256(salt).digest() if salt else b"",
    )


def _make_pools(args: argparse.Namespace, facts: common_pb2.NamespaceFacts) -> MakePools | None:
    """ValueError where what was asked for cannot be."""
    if args.pool == "daemon":
        return None
    devices = parse_devices(args.pool_device)
    ranks = args.ranks or max(1, len(devices))
    if devices and ranks != len(devices):
        raise ValueError(f"--pool-device is {args.pool_device!r}, of {len(devices)} ranks; --ranks is {ranks}")
    spec = PoolSpec(args.pool_pages, args.page_size, STORAGES[args.storage], devices, ranks, args.shm_dir)
    geometry = spec.geometry(facts.geometry)

    def make() -> EnginePools:
        if devices:
            from kvferry.client.engine_gpu_pools import make_tensors  # needs torch

            return make_tensors(spec, geometry)
        return make_files(spec, geometry)

    return make


def _config(
    args: argparse.Namespace, facts: common_pb2.NamespaceFacts, *, tokenizer: str, model_max_tokens: int
) -> WorkerConfig:
    return WorkerConfig(
        role=_ROLES[args.role],
        name=args.name or f"{args.role}-{os.getpid()}",
        socket=args.socket,
        listen=str(args.listen),
        facts=facts,
        tokenizer=tokenizer,
        model_max_tokens=min(model_max_tokens, args.max_tokens or model_max_tokens),
        chunk_tokens=args.chunk_tokens,
        local_prefill_max_tokens=args.local_prefill_max_tokens if args.role == "decode" else 0,
        max_requests=args.max_requests,
        grace_s=args.grace,
        connect_deadline_s=args.connect_timeout,
        warmups=args.warmup,
        max_running=args.max_running,
        stream_interval=args.stream_interval,
        make_pools=_make_pools(args, facts),
        keys=ApiKeys(args.api_keys) if args.api_keys else None,
    )


def _further(text: str) -> common_pb2.CacheShape:
    """The daemon judges the numbers."""
    shape = common_pb2.CacheShape(kv_heads=1, tensors=1, dtype="uint8")
    numbers = ("layers", "kv_heads", "head_dim", "tensors")
    for item in text.split(","):
        name, _, value = item.partition("=")
        if name == "dtype":
            shape.dtype = value
        elif name in numbers:
            setattr(shape, name, flags.whole(value))
        else:
            raise argparse.ArgumentTypeError(f"{item[:64]!r} is none of {', '.join((*numbers, 'dtype'))}")
    return shape


def _clock(text: str) -> float:
    value = flags.positive(text)
    if value > MAX_CLOCK:
        raise argparse.ArgumentTypeError(f"must be at most {MAX_CLOCK}, got {text!r}")
    return value
