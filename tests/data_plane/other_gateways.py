"""Gateways with an ext_proc client of their own, as their sources say that they ask a picker.

Neither can be had as a program here (agentgateway is Rust, and the module of NGINX Gateway Fabric is not on
the Go proxy), so each is a client that sends the messages which its source sends, and fails where it fails:

- `AgentGateway`: agentgateway 1.4.1, ``crates/agentgateway/src/http/ext_proc.rs``.
- `NginxGatewayFabric`: 2.6.7, ``cmd/gateway/endpoint_picker.go`` and ``modules/src/epp.js``.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import grpc

from kvist_epp.extproc.pb import ext_proc_pb2 as pb
from kvist_epp.extproc.pb.base_pb2 import HeaderMap, HeaderValue
from kvist_epp.names import DESTINATION_HEADER, DESTINATION_NAMESPACE, PROCESS_METHOD, SERVED_KEY

Channel = Any  # grpc.aio.Channel, whose stubs ask for arguments that have defaults
CHUNK = 8192


class GatewayError(Exception):
    """The gateway answers its client with an error of its own."""


@dataclass
class Answer:
    """The answer that a client gets."""

    status: int
    body: bytes = b""
    endpoint: str = ""
    sent_headers: Mapping[str, str] = field(default_factory=dict)
    """The headers that the picker set on the request."""


class AgentGateway:
    """Streams bodies both ways, takes one address, and needs the stream until the response has ended."""

    def __init__(self, picker: str, client: aiohttp.ClientSession) -> None:
        self._client = client
        self._channel: Channel = grpc.aio.insecure_channel(picker)

    async def close(self) -> None:
        """Close the connection to the picker."""
        await self._channel.close()

    async def send(self, path: str, body: bytes) -> Answer:
        """Send one request through the picker to an engine. Raises GatewayError."""
        async with self.opened(path, body) as (answer, chunks):
            answer.body = b"".join([chunk async for chunk in chunks])
            return answer

    @asynccontextmanager
    async def opened(self, path: str, body: bytes) -> AsyncIterator[tuple[Answer, AsyncIterator[bytes]]]:
        """Send one request; the response's head, and its body as it comes.

        Leaving early is a client that goes away. The source resets no stream: it reads the engine's response
        to its end for the picker, and then ends its side.
        """
        call = self._channel.stream_stream(PROCESS_METHOD)()
        try:
            await call.write(_first_message(path))
            for at in range(0, len(body), CHUNK):
                last = at + CHUNK >= len(body)
                await call.write(_body("request_body", body[at : at + CHUNK], last=last))
            picked = await self._picked(call)
            if picked.status:
                yield picked, _whole(picked.body)
                return
            async with self._client.post(
                f"http://{picked.endpoint}{path}", data=picked.body, headers=picked.sent_headers
            ) as response:
                await call.write(_response_head(response, picked.endpoint))
                picked.status = response.status
                reply = await self._next(call)
                if reply.WhichOneof("response") != "response_headers":
                    raise GatewayError(f"not the response's headers: {reply}")
                pump = asyncio.ensure_future(_pump(call, response))
                yield picked, self._passed(call)
                await pump
        finally:
            await _end(call)

    async def leave(self, path: str, body: bytes, gone: asyncio.Event) -> None:
        """Send a request whose client goes away, once ``gone`` is set, before any response."""
        call = self._channel.stream_stream(PROCESS_METHOD)()
        await call.write(_first_message(path))
        await call.write(_body("request_body", body, last=True))
        await gone.wait()
        await _end(call)

    async def _picked(self, call: Any) -> Answer:
        """Read the request's mutations; the endpoint must be one address."""
        sent: dict[str, str] = {}
        body = bytearray()
        ended = False
        while not ended:
            reply = await self._next(call)
            kind = reply.WhichOneof("response")
            if kind == "immediate_response":
                return Answer(reply.immediate_response.status.code, reply.immediate_response.body)
            if kind == "request_headers":
                for option in reply.request_headers.response.header_mutation.set_headers:
                    sent[option.header.key] = option.header.raw_value.decode()
            elif kind == "request_body":
                part = reply.request_body.response.body_mutation.streamed_response
                body += part.body
                ended = part.end_of_stream
        endpoint = sent.pop(DESTINATION_HEADER, "")
        host, _, port = endpoint.rpartition(":")
        if "," in endpoint or not host or not port.isdigit():
            raise GatewayError(f"EPP returned invalid address: {endpoint!r}")
        return Answer(0, bytes(body), endpoint, sent)

    async def _passed(self, call: Any) -> AsyncIterator[bytes]:
        """Return the response's body as it comes back from the picker: that is what the client gets."""
        while True:
            part = (await self._next(call)).response_body.response.body_mutation.streamed_response
            yield part.body
            if part.end_of_stream:
                return

    @staticmethod
    async def _next(call: Any) -> pb.ProcessingResponse:
        message = await call.read()
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # absent from the stubs
            raise GatewayError("ext_proc failed: no more response messages")
        return pb.ProcessingResponse.FromString(message)


class NginxGatewayFabric:
    """Opens a connection for each request, sends no pseudo-header, ends its side, and takes the endpoint."""

    def __init__(self, picker: str, client: aiohttp.ClientSession) -> None:
        self._picker, self._client = picker, client

    async def pick(self, body: bytes) -> Answer:
        """Ask the picker alone."""
        host, _, port = self._picker.rpartition(":")
        given = {
            "host": "pool.example",
            "content-length": str(len(body)),
            "x-epp-host": host,
            "x-epp-port": port,
        }
        values = [HeaderValue(key=key, value=value) for key, value in given.items()]
        head = pb.HttpHeaders(headers=HeaderMap(headers=values), end_of_stream=not body)
        channel: Channel
        async with grpc.aio.insecure_channel(self._picker) as channel:
            call = channel.stream_stream(PROCESS_METHOD)()
            await call.write(pb.ProcessingRequest(request_headers=head).SerializeToString())
            if body:
                await call.write(_body("request_body", body, last=True))
            await call.done_writing()
            found = Answer(200)
            async for message in call:
                reply = pb.ProcessingResponse.FromString(message)
                if reply.HasField("immediate_response"):
                    return Answer(reply.immediate_response.status.code, reply.immediate_response.body)
                for option in reply.request_headers.response.header_mutation.set_headers:
                    if option.header.key == DESTINATION_HEADER:
                        found.endpoint = option.header.raw_value.decode()
            return found

    async def send(self, path: str, body: bytes) -> Answer:
        """Send one request through the picker to an engine. Raises GatewayError."""
        picked = await self.pick(body)
        if picked.status != 200:
            return picked
        if not picked.endpoint or "," in picked.endpoint:
            raise GatewayError(f"invalid port in upstream {picked.endpoint!r}")
        async with self._client.post(f"http://{picked.endpoint}{path}", data=body) as response:
            return Answer(response.status, await response.read(), picked.endpoint)


def _first_message(path: str) -> bytes:
    """Pseudo-headers are in ``value``, all others in ``raw_value``."""
    listed = [HeaderValue(key="content-type", raw_value=b"application/json")]
    pseudo = {":method": "POST", ":path": path, ":authority": "pool.example", ":scheme": "http"}
    listed += [HeaderValue(key=k, value=v) for k, v in pseudo.items()]
    both = pb.ProtocolConfiguration(
        request_body_mode=pb.FULL_DUPLEX_STREAMED, response_body_mode=pb.FULL_DUPLEX_STREAMED
    )
    head = pb.HttpHeaders(headers=HeaderMap(headers=listed))
    return pb.ProcessingRequest(request_headers=head, protocol_config=both).SerializeToString()


def _response_head(response: aiohttp.ClientResponse, endpoint: str) -> bytes:
    headers = [HeaderValue(key=k.lower(), raw_value=v.encode()) for k, v in response.headers.items()]
    headers.append(HeaderValue(key=":status", value=str(response.status)))
    request = pb.ProcessingRequest(response_headers=pb.HttpHeaders(headers=HeaderMap(headers=headers)))
    request.metadata_context.filter_metadata[DESTINATION_NAMESPACE].fields[SERVED_KEY].string_value = endpoint
    return request.SerializeToString()


async def _pump(call: Any, response: aiohttp.ClientResponse) -> None:
    async for chunk in response.content.iter_any():
        await call.write(_body("response_body", chunk, last=False))
    await call.write(_body("response_body", b"", last=True))


async def _end(call: Any) -> None:
    """End this side of a stream, and wait for the picker to end the other."""
    await call.done_writing()
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # absent from the stubs
        pass


def _body(name: str, data: bytes, *, last: bool) -> bytes:
    request = pb.ProcessingRequest(**{name: pb.HttpBody(body=data, end_of_stream=last)})  # type: ignore[arg-type]
    return request.SerializeToString()


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    yield body


def encoded(document: object) -> bytes:
    """A request's body."""
    return json.dumps(document).encode()
