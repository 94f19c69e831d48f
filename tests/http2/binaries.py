"""h2spec and our Go gRPC client, built from their Go modules: half a minute once, then cached.

``python -m tests.http2.binaries`` builds them.
"""

import sys
from pathlib import Path

from tests.golang import GoError, build

TOOLS = Path(__file__).parent / "tools"
PACKAGES = ("github.com/summerwind/h2spec/cmd/h2spec", "./grpcpeer")


def binary(name: str) -> Path:
    """``h2spec`` or ``grpcpeer``, built if it is not there yet. Raises GoError, saying what is missing."""
    return build(TOOLS, PACKAGES) / name


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{binary('h2spec').parent}\n")
    except GoError as error:
        sys.exit(f"binaries: {error}")
