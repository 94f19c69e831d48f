"""Envoy Gateway, built from its Go module: some minutes once, then cached.

``python -m tests.e2e.binaries`` builds it and Istio, and gets everything else that ``tests/e2e`` needs.
"""

import sys
from pathlib import Path
from typing import Final

from tests.charts import binaries as charts
from tests.cluster import binaries as cluster
from tests.cluster.nftables import folder_of_nft
from tests.e2e.istio import install as istio
from tests.golang import GoError, build

TOOLS: Final = Path(__file__).parent / "tools"
PROGRAM: Final = "envoy-gateway"


def envoy_gateway() -> Path:
    """The command. Raises GoError, saying what is missing."""
    return build(TOOLS, [f"github.com/envoyproxy/gateway/cmd/{PROGRAM}"]) / PROGRAM


if __name__ == "__main__":
    try:
        for name in cluster.PROGRAMS:
            cluster.binary(name)
        for one in (folder_of_nft(), charts.helm(4), charts.kubectl(), envoy_gateway(), istio.binaries()):
            sys.stdout.write(f"{one}\n")
    except GoError as error:
        sys.exit(f"binaries: {error}")
