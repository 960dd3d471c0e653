"""The workers of a vLLM server on one of its further machines: no requests are answered here.

    python -m hone.workers.inside.vllm_follower <options of vLLM's server> --headless

vLLM's own command for it, `vllm serve --headless`, needs a distribution called vllm, which its CPU build is not.
Ends when a worker ends. Tested with vLLM 0.32.0.
"""

from __future__ import annotations

import sys

from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser


def main(arguments: list[str]) -> None:
    """Run this machine's workers until one of them, or the server, ends."""
    given = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    given.api_server_count = 0
    validate_parsed_serve_args(given)
    run_headless(given)


if __name__ == "__main__":
    main(sys.argv[1:])
