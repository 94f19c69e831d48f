"""Envoy's ext_proc protocol and its access log, without I/O.

A gateway opens one ext_proc stream per request. The session collects the request body as the gateway's body
mode allows, asks the picker once for an endpoint, and answers with the endpoint in a header and in dynamic
metadata. The stream then ends, unless responses are observed. The gateway's access log reports later how the
request ended.

- ``service``: the table of gRPC methods, and the ext_proc stream that connects a session to the picker.
- ``protocol_errors``: messages of gateways that cannot be read, counted and logged.
- ``session``: state machine of one ext_proc stream, in every body mode of Envoy.
- ``pick_request``: the question to the picker and its answer, at once or deferred.
- ``gateway_messages``: reads the gateway's messages (body chunks, headers, subset hint), encodes the answers.
- ``plain_headers``: request headers as Envoy encodes them, read without protobuf.
- ``response``: observed responses: echo of their chunks, token usage, the model's name restored.
- ``load_filter``: the KV tiers that an engine may load from, as a member of the request body.
- ``rewrite``: replacement of the model's name in request and response bodies.
- ``access_log``: Envoy's access log: how requests ended.
- ``pb``: generated protobuf code.
"""
