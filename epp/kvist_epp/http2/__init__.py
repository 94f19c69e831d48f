"""An HTTP/2 server for gRPC, with TLS and the gRPC health service. Independent of ext_proc.

A server accepts connections; a transport moves bytes between a socket and a connection; the connection
parses frames, applies flow control and limits, and passes messages to the calls of its streams. Everything
but the servers and the transport is free of I/O.

- ``server``: the listening port: accepts, checks and drains connections.
- ``server_transport``: one accepted socket: back-pressure, fair reads, time-outs.
- ``http2_connection``: one HTTP/2 connection: frames in, calls driven, frames out.
- ``frames``: names of HTTP/2, frames as bytes, and the header blocks this server sends.
- ``frame_reader``: parses frames.
- ``header_reader``: decodes header blocks, and checks the rules for requests.
- ``traced_block``: header blocks that differ in their trace context alone.
- ``stream_table``: the open streams of a connection, how each of them ends, and the bytes to send.
- ``grpc_stream``: one stream: gRPC messages out of DATA, and the sink of its call.
- ``limits``: every bound, and what is measured against them: rates, stalls, memory, ends by reason.
- ``call``: the interface between gRPC methods and their transport.
- ``grpc_health``: the gRPC health service.
- ``grpc_server``: the same methods on grpc.aio, as reference and fallback.
- ``tls``: certificates: self-issued or from files, renewed without closing connections.
- ``tls_session``: TLS of one connection, without I/O.
- ``pb``: generated protobuf code.
"""
