"""The programs of a cluster, built from their Go modules: about six minutes once, then cached.

``python -m tests.cluster.binaries`` builds what the tests need; with names after it, those.
"""

import sys
from pathlib import Path

from tests.charts.binaries import kubectl
from tests.cluster.nftables import folder_of_nft
from tests.golang import GoError, build

TOOLS = Path(__file__).parent / "tools"
PROGRAMS = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kube-proxy": "k8s.io/kubernetes/cmd/kube-proxy",
    "coredns": "github.com/coredns/coredns",
}
FILES = {"etcd": "server"}
"""What ``go build`` calls a program that is not named like its package."""
VERSION = "1.36.3"
_STAMP = "-X k8s.io/component-base/version."
LDFLAGS = " ".join(
    (
        "-s -w",
        f"{_STAMP}gitVersion=v{VERSION}",  # else v0.0.0-master, which clients and charts refuse
        f"{_STAMP}gitMajor=1",
        f"{_STAMP}gitMinor=36",
    )
)


def binary(name: str) -> Path:
    """One program, built if it is not there yet. Raises GoError, saying what is missing."""
    return build(TOOLS, [PROGRAMS[name]], ldflags=LDFLAGS) / FILES.get(name, name)


if __name__ == "__main__":
    try:
        for one in sys.argv[1:] or PROGRAMS:
            sys.stdout.write(f"{binary(one)}\n")
        sys.stdout.write(f"{folder_of_nft()}\n{kubectl()}\n")
    except GoError as error:
        sys.exit(f"binaries: {error}")
