# mypy: disable-error-code="import-not-found, no-any-return"
"""Runs in vLLM's own environment: a GPU-less render server for each argument, all in one process.

vLLM's imports take ten seconds and half a gigabyte; five render servers in one process pay that once.
An argument is a JSON list of the words behind ``vllm launch render``, the model's folder first.
"""

import asyncio
import json
import sys
from argparse import Namespace

import uvloop
from vllm.entrypoints.launchers.render.entry import run_launch_fastapi
from vllm.utils.argparse_utils import FlexibleArgumentParser

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser, validate_parsed_serve_args
except ImportError:  # before vLLM 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args


def _parse(words: str) -> Namespace:
    model, *flags = json.loads(words)
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args([model, "--host", "127.0.0.1", *flags])
    parsed.model = model
    validate_parsed_serve_args(parsed)
    return parsed


async def _serve(all_servers: list[Namespace]) -> None:
    await asyncio.gather(*(run_launch_fastapi(one) for one in all_servers))


if __name__ == "__main__":
    uvloop.run(_serve([_parse(words) for words in sys.argv[1:]]))
