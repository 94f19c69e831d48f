"""``kvist sim engine``: vLLM's command line, a process that looks like vLLM."""

import asyncio
import logging
import sys
from collections.abc import Sequence

from kvist_epp.errors import ModelFilesError, SettingsError


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until SIGTERM or Ctrl-C and returns the exit code; SystemExit(2) for flags vLLM does not
    know."""
    from kvist_sim.engine import args, run

    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    try:
        settings = args.read(sys.argv[1:] if argv is None else argv)
        with asyncio.Runner(loop_factory=_loop) as runner:
            return runner.run(run.serve(settings))
    except (SettingsError, ModelFilesError) as problem:
        print(f"kvist sim engine: error: {problem}", file=sys.stderr)
        return 1


def _loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is installed: half the CPU per streamed token."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


if __name__ == "__main__":
    sys.exit(main())
