"""An OTLP collector that keeps what it gets, over HTTP and over gRPC."""

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

# Read by grpc when it is imported: see kvist_epp.http2.grpc_server.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")

import grpc

HOST = "127.0.0.1"
SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


@dataclass(frozen=True, slots=True)
class Seen:
    """One span as it arrived."""

    service: str
    """``service.name`` of its resource."""
    resource: Mapping[str, Any]
    span: Span

    @property
    def name(self) -> str:
        """Return its name."""
        return self.span.name

    @property
    def trace_id(self) -> str:
        """Return the id of its trace, in hexadecimal."""
        return self.span.trace_id.hex()

    @property
    def span_id(self) -> str:
        """Return its own id."""
        return self.span.span_id.hex()

    @property
    def parent_id(self) -> str:
        """Return the id of its parent; empty for a root."""
        return self.span.parent_span_id.hex()

    @property
    def attributes(self) -> dict[str, Any]:
        """Return its attributes."""
        return {each.key: _value(each.value) for each in self.span.attributes}

    @property
    def failed(self) -> bool:
        """Return whether its status is an error."""
        return self.span.status.code == Status.STATUS_CODE_ERROR


class Collector:
    """``async with Collector() as collector``: listens on both ports, ``http`` and ``grpc``."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.headers: list[dict[str, str]] = []
        """Headers, or metadata, of each export."""
        self.status = 200
        """HTTP status of the answers; not 200: the spans are not kept."""
        self.code = grpc.StatusCode.OK
        """gRPC status of the answers."""
        self.rejects = 0
        """Spans that each answer says were rejected."""
        self.open = asyncio.Event()
        """Unset: no export is answered."""
        self.open.set()
        self.http = self.grpc = ""

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/v1/traces", self._post)
        self._runner = web.AppRunner(application, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, HOST, 0).start()
        self.http = f"http://{HOST}:{self._runner.addresses[0][1]}"
        self._server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(self._export)
        handlers = grpc.method_handlers_generic_handler(SERVICE, {"Export": handler})
        self._server.add_generic_rpc_handlers([handlers])
        self.grpc = f"http://{HOST}:{self._server.add_insecure_port(f'{HOST}:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.open.set()
        await self._server.stop(None)
        await self._runner.cleanup()

    async def until(self, *names: str, service: str = "") -> dict[str, Seen]:
        """Wait until there is a span of each of these names, if given of this service; return the first of
        each. The test's time limit bounds it."""
        while True:
            found: dict[str, Seen] = {}
            for seen in self.spans:
                if not service or seen.service == service:
                    found.setdefault(seen.name, seen)
            if all(name in found for name in names):
                return found
            await asyncio.sleep(0.05)

    async def _post(self, request: web.Request) -> web.Response:
        body = await request.read()
        await self.open.wait()
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        if self.status != 200:
            return web.Response(status=self.status)
        return web.Response(body=self._keep(body), content_type="application/x-protobuf")

    async def _export(self, body: bytes, context: Any) -> bytes:
        await self.open.wait()
        self.headers.append(dict(context.invocation_metadata()))
        if self.code is not grpc.StatusCode.OK:
            await context.abort(self.code, "as the test says")
        return self._keep(body)

    def _keep(self, body: bytes) -> bytes:
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            resource = {each.key: _value(each.value) for each in group.resource.attributes}
            for scope in group.scope_spans:
                name = str(resource.get("service.name", ""))
                self.spans += [Seen(name, resource, span) for span in scope.spans]
        answer = ExportTraceServiceResponse()
        answer.partial_success.rejected_spans = self.rejects
        return answer.SerializeToString()


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None
