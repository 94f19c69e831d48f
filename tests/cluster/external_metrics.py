"""A metric from outside the cluster: an aggregated API, ``external.metrics.k8s.io``, served by the test."""

import ssl
import tempfile
from base64 import b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from aiohttp import web
from tests.cluster.cluster import Cluster
from tests.cluster.node.network import ROUTER
from tests.cluster.space import Space

from kvist_epp.http2.tls import AUTHORITY_LIFETIME, LEAF_LIFETIME
from kvist_kube.certificates import CertificateAuthority

Json = dict[str, Any]
GROUP: Final = "external.metrics.k8s.io"
VERSION: Final = "v1beta1"
ROOT: Final = f"/apis/{GROUP}/{VERSION}"
NAME: Final = "requests"
"""Of Service and metric."""
PORT: Final = 6444


class Metric:
    """One number that autoscalers ask for; set it at will."""

    def __init__(self) -> None:
        self.value = 0

    async def discovery(self, _: web.Request) -> web.Response:
        """Answer with the list of resources."""
        resource = {"name": "*", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
        found = {"groupVersion": f"{GROUP}/{VERSION}", "resources": [{**resource, "singularName": ""}]}
        return web.json_response({"kind": "APIResourceList", "apiVersion": "v1", **found})

    async def values(self, request: web.Request) -> web.Response:
        """The number, as of now."""
        item = {
            "metricName": request.match_info["metric"],
            "metricLabels": {},
            "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "value": str(self.value),
        }
        kind = {"kind": "ExternalMetricValueList", "apiVersion": f"{GROUP}/{VERSION}"}
        return web.json_response({**kind, "metadata": {}, "items": [item]})


@asynccontextmanager
async def external_metric(cluster: Cluster, space: Space) -> AsyncIterator[Metric]:
    """Served in this process, in the network of the cluster, and known to its API server."""
    metric, authority = Metric(), CertificateAuthority("test", datetime.now(UTC), AUTHORITY_LIFETIME)
    application = web.Application()
    application.router.add_get(ROOT, metric.discovery)
    application.router.add_get(ROOT + "/namespaces/{namespace}/{metric}", metric.values)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    listening = cluster.inside.listening(ROUTER, PORT)
    await web.SockSite(runner, listening, ssl_context=_tls(authority, f"{NAME}.{space.name}.svc")).start()
    try:
        await space.apply(*_objects(space.name, authority.pem))
        yield metric
    finally:
        await space.client.ask("DELETE", _path(), expect=(200, 404))
        await runner.cleanup()


def _path() -> str:
    return f"/apis/apiregistration.k8s.io/v1/apiservices/{VERSION}.{GROUP}"


def _tls(authority: CertificateAuthority, name: str) -> ssl.SSLContext:
    certificate, key = authority.sign([name], datetime.now(UTC), LEAF_LIFETIME)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "both.pem"
        path.write_bytes(certificate + key)
        context.load_cert_chain(path)
    return context


def _objects(namespace: str, authority: bytes) -> list[Json]:
    """A Service without pods, where it leads, and the API behind it."""
    port = {"name": "https", "port": 443, "protocol": "TCP"}
    service: Json = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME}}
    service["spec"] = {"ports": [{**port, "targetPort": PORT}]}
    labels = {"kubernetes.io/service-name": NAME}
    way = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": NAME, "labels": labels},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [ROUTER], "conditions": {"ready": True}}],
        "ports": [{**port, "port": PORT}],
    }
    spec = {
        "group": GROUP,
        "version": VERSION,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "service": {"name": NAME, "namespace": namespace, "port": 443},
        "caBundle": b64encode(authority).decode(),
    }
    api = {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "spec": spec}
    return [service, way, {**api, "metadata": {"name": f"{VERSION}.{GROUP}"}}]
