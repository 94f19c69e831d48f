# mypy: disable-error-code="import-not-found, no-any-return"
"""Runs in vLLM's own environment: a GPU-less render server for each model folder, all in one process.

vLLM's imports take ten seconds and half a gigabyte; five render servers in one process pay that once.
Arguments: pairs ``FOLDER PORT``, then ``--`` and flags given to every server.
"""

import asyncio
import sys
from argparse import Namespace

import uvloop
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.render.entry import run_launch_fastapi
from vllm.utils.argparse_utils import FlexibleArgumentParser


def servers(arguments: list[str]) -> list[Namespace]:
    """The parsed arguments of each server."""
    cut = arguments.index("--")
    pairs, flags = arguments[:cut], arguments[cut + 1 :]
    return [_parse(folder, port, flags) for folder, port in zip(pairs[::2], pairs[1::2], strict=True)]


def _parse(folder: str, port: str, flags: list[str]) -> Namespace:
    parser = make_arg_parser(FlexibleArgumentParser())
    parsed = parser.parse_args([folder, "--host", "127.0.0.1", "--port", port, *flags])
    parsed.model = folder
    validate_parsed_serve_args(parsed)
    return parsed


async def _serve(all_servers: list[Namespace]) -> None:
    await asyncio.gather(*(run_launch_fastapi(one) for one in all_servers))


if __name__ == "__main__":
    uvloop.run(_serve(servers(sys.argv[1:])))
