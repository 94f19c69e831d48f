"""The whole cluster in one box: ``unshare … python -m tests.cluster.node.box FOLDER``.

The box is a set of namespaces (network, mounts, process ids) of its own, and this process is the first in
it: when it ends, or the test that started it, in whatever way, the kernel ends every process in the box, and
network and mounts are gone with the last of them. So there is nothing to tidy up.

In it: etcd and kube-apiserver (``ControlPlane``), kube-controller-manager, kube-scheduler, kube-proxy in
nftables mode, CoreDNS, and the kubelets of all nodes, which are tasks of this process.
"""

import asyncio
import functools
import json
import os
import ssl
import sys
from pathlib import Path
from typing import Any, Final

from tests.cluster.binaries import binary
from tests.cluster.client import Client, client
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nftables import folder_of_nft

from kvist_sim.http1 import answers
from kvist_sim.processes import Children

from .follow import Store
from .images import Images
from .network import DNS, DOMAIN, PODS, ROUTER, own_network
from .nodes import Node, NodeSpec

READY: Final = "ready.json"
"""Written when the cluster takes pods: where the API is."""
SPEC: Final = "box.json"
START_SECONDS: Final = 60.0
MANAGER_PORT: Final = 10257
PROXY_PORT: Final = 10256
DNS_PORT: Final = 8181
APISERVER: Final = (
    "--bind-address=0.0.0.0",
    f"--advertise-address={ROUTER}",  # an Endpoints object may not have an address of the loopback
    "--endpoint-reconciler-type=lease",
    "--kubelet-preferred-address-types=InternalIP",
)
FRONT: Final = "front-proxy"
"""Name of its certificate towards aggregated APIs."""
QUICK: Final = ("--kube-api-qps=300", "--kube-api-burst=600")
"""With the usual limits controllers begin to work four seconds later."""
COREFILE: Final = """\
{domain}:53 in-addr.arpa:53 {{
  bind {dns}
  errors
  kubernetes {domain} in-addr.arpa {{
    kubeconfig {kubeconfig}
    ttl 30
  }}
}}
.:53 {{
  bind {dns}
  ready {dns}:{port}
  template ANY ANY {{
    rcode NXDOMAIN
  }}
}}
"""
"""The last block: nothing outside the cluster has a name. In one block with ``kubernetes`` its answer would
come first."""


async def run(folder: Path) -> None:
    """Start everything, say so, and go on for ever."""
    told = json.loads((folder / SPEC).read_text())
    specs = [NodeSpec.read(each) for each in told["nodes"]]
    await own_network([spec.address for spec in specs])
    await _private_names()
    images = Images(folder / "images", told["images"])
    preparing = asyncio.create_task(asyncio.to_thread(images.prepare))
    plane = ControlPlane(folder, flags=(*APISERVER, *_aggregation(folder)))
    plane.keys.issue(FRONT)
    async with (
        plane,
        client(plane) as admin,
        Children(folder) as children,
        asyncio.TaskGroup() as group,
    ):
        starting = asyncio.gather(*_helpers(children, plane, folder, specs[0].name))
        store = Store(admin)
        group.create_task(store.run())
        nodes = [Node(spec, admin, store, images, folder) for spec in specs]
        plane.keys.issue("kubelet", names=tuple(spec.address for spec in specs))
        for node in nodes:
            await node.register()
            await node.serve_logs(_server(folder / "kubelet"))
            group.create_task(node.run())
        await asyncio.gather(starting, preparing)
        await _usable(admin, len(specs))
        _say(folder, {"port": plane.port})


def _aggregation(folder: Path) -> list[str]:
    """Return the flags by which aggregated APIs recognise this API server and its users."""
    kinds = {"extra-headers-prefix": "Extra-", "group-headers": "Group", "username-headers": "User"}
    return [
        f"--proxy-client-cert-file={folder / FRONT}.crt",
        f"--proxy-client-key-file={folder / FRONT}.key",
        f"--requestheader-client-ca-file={folder / 'ca.crt'}",
        f"--requestheader-allowed-names={FRONT}",
        *(f"--requestheader-{flag}=X-Remote-{header}" for flag, header in kinds.items()),
    ]


def _helpers(children: Children, plane: ControlPlane, folder: Path, node: str) -> list[Any]:
    """Return the starts of the parts that need an API server; they are started together."""
    admin = plane.kubeconfig("components")
    manager = children.start("kube-controller-manager", _manager(plane, admin))
    children.start("kube-scheduler", _scheduler(admin))
    settings = folder / "kube-proxy.json"
    settings.write_text(json.dumps(_proxy(admin, node)))
    proxy = children.start("kube-proxy", [str(binary("kube-proxy")), f"--config={settings}"])
    corefile = folder / "Corefile"
    corefile.write_text(COREFILE.format(domain=DOMAIN, dns=DNS, kubeconfig=admin, port=DNS_PORT))
    dns = children.start("coredns", [str(binary("coredns")), "-conf", str(corefile)])
    ready = functools.partial(children.ready, seconds=START_SECONDS)
    return [
        ready(dns, functools.partial(answers, DNS, DNS_PORT, "/ready")),
        ready(proxy, functools.partial(answers, "127.0.0.1", PROXY_PORT, "/healthz")),
        ready(manager, functools.partial(_there, MANAGER_PORT)),
    ]


def _manager(plane: ControlPlane, kubeconfig: Path) -> list[str]:
    keys = plane.keys
    return [
        *(str(binary("kube-controller-manager")), *_kubeconfigs(kubeconfig), *QUICK),
        *(f"--secure-port={MANAGER_PORT}", "--use-service-account-credentials=true"),
        f"--service-account-private-key-file={keys.accounts}",
        *(f"--root-ca-file={keys.ca}", f"--cluster-signing-cert-file={keys.ca}"),
        f"--cluster-signing-key-file={keys.folder / 'ca.key'}",
        *("--leader-elect=false", "--node-monitor-period=1s"),
        # an autoscaler that decides in seconds, not minutes
        *("--horizontal-pod-autoscaler-sync-period=1s",),
        *("--horizontal-pod-autoscaler-downscale-stabilization=3s",),
    ]


def _scheduler(kubeconfig: Path) -> list[str]:
    return [str(binary("kube-scheduler")), *_kubeconfigs(kubeconfig), *QUICK, "--leader-elect=false"]


def _kubeconfigs(path: Path) -> tuple[str, ...]:
    flags = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    return (*(f"--{flag}={path}" for flag in flags), "--bind-address=127.0.0.1")


def _proxy(kubeconfig: Path, node: str) -> dict[str, Any]:
    """One for all nodes: they share the box's network namespace."""
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "nftables",
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "clusterCIDR": PODS,
        "hostnameOverride": node,
        "healthzBindAddress": f"127.0.0.1:{PROXY_PORT}",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0, "min": 0},  # the limit of the machine may not be changed from here
    }


async def _private_names() -> None:
    """Give the box its own /run/netns, so that other processes do not see its pods' namespaces."""
    for command in ("mkdir -p /run/netns", "mount -t tmpfs t /run/netns"):
        process = await asyncio.create_subprocess_exec(*command.split())
        if await process.wait():
            raise OSError(f"{command}: failed")


async def _there(port: int) -> bool:
    """Return whether a process listens on the port."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def _usable(admin: Client, nodes: int) -> None:
    """Controllers work, nodes are taken for ready."""
    while True:
        found = await admin.ask("GET", "/api/v1/nodes")
        taints = [node["spec"].get("taints") for node in found["items"]]
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        there = await admin.ask("GET", account, expect=(200, 404))
        if taints == [None] * nodes and there.get("code") != 404:
            return
        await asyncio.sleep(0.05)


def _server(files: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.with_suffix(".crt"), files.with_suffix(".key"))
    return context


def _say(folder: Path, told: dict[str, Any]) -> None:
    beside = folder / f"{READY}.new"
    beside.write_text(json.dumps(told))
    beside.rename(folder / READY)


def main(folder: Path) -> None:
    """Run the box until it is killed."""
    os.environ["PATH"] = f"{folder_of_nft()}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    if sys.version_info < (3, 12):  # else a thread for each child
        asyncio.get_event_loop_policy().set_child_watcher(asyncio.PidfdChildWatcher())
    asyncio.run(run(folder))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
