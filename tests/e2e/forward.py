"""``kubectl port-forward`` for a cluster whose kubelets have no streams: connections go to the Service's
address or the pod's, which this process reaches, being in the cluster's network.

``python -m tests.e2e.forward KUBECTL [-n NAMESPACE] port-forward [-n NAMESPACE] TYPE/NAME LOCAL[:REMOTE]``
"""

import argparse
import asyncio
import json
import subprocess
import sys
from typing import Any, Final

Json = dict[str, Any]
HOST: Final = "127.0.0.1"
_PIECE_BYTES: Final = 1 << 16


class _Kubectl:
    def __init__(self, program: str, namespace: str) -> None:
        self._words = [program, *([f"--namespace={namespace}"] if namespace else [])]

    def get(self, *what: str) -> Json:
        """Return the objects as JSON. Raises CalledProcessError without any."""
        words = [*self._words, "get", *what, "--output=json"]
        found: Json = json.loads(subprocess.run(words, capture_output=True, check=True, text=True).stdout)
        return found


def destination(kubectl: _Kubectl, target: str, port: int) -> tuple[str, int]:
    """Return host and port that serve a port of a Service or Deployment. Exits if there is none."""
    kind, _, _ = target.partition("/")
    found = kubectl.get(target)
    if kind == "service":
        if port not in [each["port"] for each in found["spec"]["ports"]]:
            sys.exit(f"error: Service {target} does not have a service port {port}")
        return str(found["spec"]["clusterIP"]), port
    labels = found["spec"]["selector"]["matchLabels"]
    pods = kubectl.get("pods", f"--selector={','.join(f'{k}={v}' for k, v in labels.items())}")["items"]
    running = [pod for pod in pods if pod.get("status", {}).get("phase") == "Running"]
    if not running:
        sys.exit(f"error: no pod of {target} is running")
    return str(running[0]["status"]["podIP"]), port


async def forward(local: int, host: str, port: int) -> None:
    """Forward connections until the process is killed."""

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, port)
        await asyncio.gather(_copy(reader, back), _copy(there, writer))

    server = await asyncio.start_server(one, HOST, local)
    sys.stdout.write(f"Forwarding from {HOST}:{local} -> {port}\n")
    sys.stdout.flush()
    await server.serve_forever()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while piece := await reader.read(_PIECE_BYTES):
        writer.write(piece)
        await writer.drain()
    writer.close()


def main(words: list[str]) -> None:
    """Forward as the words of ``kubectl port-forward`` say. Raises OSError if the port is in use."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kubectl")
    parser.add_argument("verb", choices=["port-forward"])
    parser.add_argument("target")
    parser.add_argument("ports")
    parser.add_argument("-n", "--namespace", default="")
    told = parser.parse_args(words)
    local, _, remote = told.ports.partition(":")
    kubectl = _Kubectl(told.kubectl, told.namespace)
    host, port = destination(kubectl, told.target, int(remote or local))
    asyncio.run(forward(int(local), host, port))


if __name__ == "__main__":
    main(sys.argv[1:])
