"""No package, no bench and no script of ours names a call that could run data as code; the tests' few are named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.calls_that_run_data import runs_data

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = (
    *("bench", "client", "connectors", "csrc", "daemon", "deploy", "docs", "front", "loadgen", "package", "proto"),
    *("radix", "tests", "transfer", "workers", ".ci"),
)
ALLOWED = {
    # Processes of one program that talk to each other, over pipes that nobody else has an end of.
    "bench/gpu/nodes.py": {"multiprocessing.Pipe"},
    "bench/gpu/slots.py": {"multiprocessing.Pipe"},
    "bench/front_streams.py": {"multiprocessing.Pipe"},
    "bench/loadgen_speed.py": {"multiprocessing.Pipe"},
    "bench/sglang/busy_turns.py": {"multiprocessing.Pipe"},
    # Makes classes of other versions of vLLM, from text of its own.
    "tests/connectors/vllm/test_versions.py": {"builtins.compile", "builtins.exec"},
}
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def names_of(source: str) -> list[str]:
    return [found.what for found in runs_data(ast.parse(source))]


def test_the_walk_sees_every_file_of_ours() -> None:
    walked = {path.relative_to(ROOT).parts[0] for path in FILES}
    tops = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("*/*.py")} | {"bench", "docs", "tests"}
    assert tops - {"build", "wheels"} <= walked
    assert not list(ROOT.glob("*.py")), "a script beside the folders is not walked"


def test_nothing_that_runs_data() -> None:
    wrong = []
    for path in FILES:
        name = str(path.relative_to(ROOT))
        found = list(runs_data(ast.parse(path.read_text(), name)))
        allowed = ALLOWED.get(name, set())
        wrong += [f"{name}:{each.line}: {each.what}" for each in found if each.what not in allowed]
        gone = allowed - {each.what for each in found}
        wrong += [f"{name}: {what} is allowed, and is not there any more" for what in sorted(gone)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("import pickle as p\np.loads(b'')", "pickle.loads"),
        ("from pickle import loads as read\nread(b'')", "pickle.loads"),
        ("def late():\n    import dill.session", "dill.session"),
        ("import importlib\nimportlib.import_module('marshal')", "marshal"),
        ("from yaml import load\nload('')", "yaml.load"),
        ("import yaml as y\ny.full_load('')", "yaml.full_load"),
        ("import yaml\nyaml.load_all('')", "yaml.load_all"),
        ("import yaml\nyaml.unsafe_load_all('')", "yaml.unsafe_load_all"),
        ("import yaml\nread = yaml.unsafe_load", "yaml.unsafe_load"),
        ("from yaml import UnsafeLoader", "yaml.UnsafeLoader"),
        ("from torch import load\nload('')", "torch.load"),
        ("import torch as t\nt.load('', weights_only=True)", "torch.load"),
        ("import torch.jit\ntorch.jit.load('')", "torch.jit.load"),
        ("import numpy as np\nnp.load('', allow_pickle=True)", "allow_pickle="),
        ("import numpy as np\nnp.load('', None, True)", "allow_pickle="),
        ("import numpy as np\nflag = True\nnp.load('', allow_pickle=flag)", "allow_pickle="),
        ("import pandas as pd\npd.read_pickle('')", "pandas.read_pickle"),
        ("eval('1')", "builtins.eval"),
        ("run = exec", "builtins.exec"),
        ("import builtins\nbuiltins.eval('1')", "builtins.eval"),
        ("import builtins as b\ngetattr(b, 'eval')('1')", "eval"),
        ("from builtins import eval as run", "builtins.eval"),
        ("__builtins__.compile('', '', 'exec')", "builtins.compile"),
        ("__import__('os')", "builtins.__import__"),
        ("import multiprocessing\nmultiprocessing.Queue()", "multiprocessing.Queue"),
        ("import multiprocessing as mp\nmp.get_context('spawn').Pipe()", "multiprocessing.Pipe"),
        (
            "import multiprocessing as mp\nctx = mp.get_context('spawn')\nctx.SimpleQueue()",
            "multiprocessing.SimpleQueue",
        ),
        ("from multiprocessing.connection import Listener", "multiprocessing.connection.Listener"),
        ("class Made:\n    def __reduce__(self):\n        return (print, ())", "__reduce__"),
        ("import subprocess\nsubprocess.run('ls', shell=True)", "shell="),
        ("import os as o\no.system('ls')", "os.system"),
        ("from os import popen", "os.popen"),
        ("import asyncio\nasyncio.create_subprocess_shell('ls')", "asyncio.create_subprocess_shell"),
        ("agent.deserialize_descs(b'')", "deserialize_descs"),
        ("transformers.AutoModel.from_pretrained('', trust_remote_code=True)", "trust_remote_code="),
    ],
)
def test_what_is_planted_is_found(source: str, what: str) -> None:
    assert what in names_of(source)


@pytest.mark.parametrize(
    "source",
    [
        "import yaml\nyaml.safe_load('')\nyaml.load_safely = None",
        "import numpy as np\nnp.load('', allow_pickle=False)",
        "import re\nre.compile('a')",
        "import subprocess\nsubprocess.run(['ip', 'netns', 'exec'], shell=False)",
        "import multiprocessing\nmultiprocessing.get_context('spawn').Process()",
        "import json\njson.load(open('a'))",
        "model.eval()\ncode = 1\nprint(code)",
    ],
)
def test_what_is_harmless_is_not(source: str) -> None:
    assert not names_of(source)
