"""python -m tests.fuzz TARGET [--seconds N | --runs N] [--corpus DIR]   one target under atheris
python -m tests.fuzz all --seconds N                                   each in a process of its own, and a table
python -m tests.fuzz keep --seconds N                                  the same, and then tests/fuzz/seeds is made anew

What is new and what is a finding stays in DIR (build/fuzz/TARGET). What `keep` keeps of it is the smallest inputs of
those that cover all of it. A finding's input belongs into the target's SEEDS.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SEEDS = Path(__file__).parent / "seeds"
TARGETS = (
    "worker_stream",
    "registrations",
    "peer_prefill",
    "peer_decode",
    "questions",
    "settings",
    "host_file",
    "courier_packets",
    "orders",
    "http_bodies",
)
MAX_BYTES = 8192  # of an input
MAX_SECONDS = 10  # of an input
MAX_MEMORY = 1024  # MiB
KEPT, KEPT_BYTES = 50, 28 << 10  # inputs of a target in tests/fuzz/seeds


def seeds_of(name: str) -> list[bytes]:
    """The target's own conversations, and the inputs that are kept."""
    kept = sorted((SEEDS / name).glob("*")) if (SEEDS / name).is_dir() else []
    own: list[bytes] = importlib.import_module(f"tests.fuzz.{name}").SEEDS
    return own + [path.read_bytes() for path in kept]


def instrument(module: types.ModuleType, atheris: Any) -> None:
    """Coverage of what kvferry has loaded. An import hook would find it as installed, not as here."""
    for owner in [module, *(value for value in vars(module).values() if isinstance(value, type))]:
        if isinstance(owner, type) and owner.__module__ != module.__name__:
            continue
        for value in list(vars(owner).values()):
            function = getattr(value, "__func__", getattr(value, "fget", value))
            if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                atheris.instrument_func(function)


def fuzz(name: str, options: argparse.Namespace) -> None:
    import atheris

    target = importlib.import_module(f"tests.fuzz.{name}")
    importlib.import_module("tests.fuzz.stage").watch_sessions()
    for each, module in sorted(sys.modules.items()):
        if each.startswith("kvferry.") and not each.startswith(("kvferry.proto.", "kvferry._core")):
            instrument(module, atheris)
    corpus = Path(options.corpus or ROOT / "build" / "fuzz" / name)
    corpus.mkdir(parents=True, exist_ok=True)
    if options.merge_into:
        # libFuzzer starts itself anew, by a shell, and gives that the words that it needs.
        again = f"{sys.executable} -m tests.fuzz {name} --merge-into {options.merge_into}"
        words = options.libfuzzer or ["-merge=1", options.merge_into, str(corpus)]
        atheris.Setup([again, *words], target.one_input)
        atheris.Fuzz()
        return
    for number, seed in enumerate(seeds_of(name)):
        (corpus / f"seed-{number}").write_bytes(seed)
    words = [
        name,
        str(corpus),
        f"-max_len={MAX_BYTES}",
        f"-timeout={MAX_SECONDS}",
        f"-rss_limit_mb={MAX_MEMORY}",
        f"-artifact_prefix={corpus.parent / name}-",
        "-print_final_stats=1",
        f"-runs={options.runs}" if options.runs else f"-max_total_time={options.seconds}",
    ]
    mutate = target.mutate

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        # One in four by libFuzzer, which knows what comparisons wanted.
        return atheris.Mutate(data, most) if seed % 4 == 0 else mutate(data, most, seed)

    atheris.Setup(words, target.one_input, custom_mutator=mutated)
    atheris.Fuzz()


def every(options: argparse.Namespace) -> int:
    """Each target for so many seconds."""
    print(
        f"{'target':<18}{'executions':>11}{'a second':>10}{'edges':>8}{'features':>10}{'inputs':>8}{'MiB':>6}  findings"
    )
    bad = 0
    for name in TARGETS:
        words = [sys.executable, "-m", "tests.fuzz", name, f"--seconds={options.seconds}", f"--runs={options.runs}"]
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
            environment = {**os.environ, "FUZZ_FOLDER": folder}  # libFuzzer's end runs nothing of Python's
            done = subprocess.run(
                words, cwd=ROOT, env=environment, capture_output=True, text=True, errors="replace", check=False
            )
        said = done.stderr
        progress = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", said) or [("0", "0", "0")]
        stat = {key: int(value) for key, value in re.findall(r"stat::(\w+):\s+(\d+)", said)}
        edges, features, inputs = progress[-1]
        runs, memory = stat.get("number_of_executed_units", 0), stat.get("peak_rss_mb", 0)
        rate = stat.get("average_exec_per_sec", 0)
        ended = "none" if done.returncode == 0 else f"ended with {done.returncode}, see build/fuzz/{name}-*"
        print(f"{name:<18}{runs:>11}{rate:>10}{edges:>8}{features:>10}{inputs:>8}{memory:>6}  {ended}", flush=True)
        if done.returncode != 0:
            bad += 1
            print(said[-4000:], file=sys.stderr)
    return int(bad > 0)


def keep(options: argparse.Namespace) -> int:
    """Makes the folder of kept inputs anew: what each target's corpus covers, in as few and small inputs as that takes,
    and of those the smallest.
    """
    if every(options):
        return 1
    for name in TARGETS:
        own = {bytes(seed) for seed in importlib.import_module(f"tests.fuzz.{name}").SEEDS}
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-m", "tests.fuzz", name, "--merge-into", folder]
            subprocess.run(words, cwd=ROOT, capture_output=True, check=True)
            merged = sorted((path.read_bytes() for path in Path(folder).iterdir()), key=lambda data: (len(data), data))
        shutil.rmtree(SEEDS / name, ignore_errors=True)
        (SEEDS / name).mkdir(parents=True)
        left, count = KEPT_BYTES, 0
        for data in merged:
            if data not in own and count < KEPT and len(data) <= left:
                (SEEDS / name / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
                left, count = left - len(data), count + 1
        print(f"{name:<18}{count:>4} of {len(merged)} kept, {KEPT_BYTES - left} bytes", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=("all", "keep", *TARGETS))
    parser.add_argument("--seconds", type=int, default=300, help="of a target (300)")
    parser.add_argument("--runs", type=int, default=0, help="instead: so many executions")
    parser.add_argument("--corpus", help="folder of inputs (build/fuzz/TARGET)")
    parser.add_argument("--merge-into", help=argparse.SUPPRESS)
    options, options.libfuzzer = parser.parse_known_args()
    if options.libfuzzer and not options.merge_into:
        parser.error(f"unrecognized arguments: {' '.join(options.libfuzzer)}")
    for name in ("kvferry", "asyncio"):  # hostile input is warned of
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if options.target in ("all", "keep"):
        return (every if options.target == "all" else keep)(options)
    fuzz(options.target, options)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("PYTHONHASHSEED", "0")
    sys.exit(main())
