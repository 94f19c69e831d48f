"""kvist-epp, the endpoint picker: Envoy asks it over ext_proc where each request should go.

The path of one request::

    http2 → extproc → director → prompt → index → scheduling → extproc

The path of a KV event of an engine::

    kvevents (feed, sequencing) → engines.vllm (decode) → kvevents (ingestion) → index

The two paths meet in the index. Code that can be pure is pure: a transition returns the I/O to perform.
Sockets are opened only by the servers, the subscriber, the scrapers and the clients of other replicas, and
only the package ``app`` connects the parts. Prompt text never leaves the process. Import contracts enforce
this.

- ``app``: the picker as a process: startup, ports, readiness, shutdown.
- ``http2``: the HTTP/2 and gRPC server with TLS, independent of ext_proc.
- ``extproc``: ext_proc sessions, bodies and replies; Envoy's access log.
- ``director``: one request from its ext_proc message to its end; the registry of endpoints.
- ``flowcontrol``: admission, queue, fairness, deadlines, capacity, priorities.
- ``scheduling``: the routing policy: the cost of each endpoint, and the choice.
- ``load``: requests in flight, backlog, prefill rate, TPOT admission of each endpoint.
- ``endpoints``: discovery of endpoints, and their scraped metrics.
- ``engines``: everything that is specific to one kind of inference engine.
- ``index``: the tree over bytes of cached prefixes, lookup, accuracy, snapshots.
- ``kvevents``: subscription to KV events, sequencing, replay, ingestion.
- ``prefix_stats``: popularity and value of prefixes.
- ``prompt``: parsing of requests, chat templates, vocabularies.
- ``replicas``: exchange of load and index between replicas of the picker.
- ``disaggregation``: prompts that one endpoint computes for another one.
- ``prewarm``: computation of hot prefixes where they will be needed.
- ``telemetry``: metrics and logs.
- ``tracing``: OpenTelemetry traces of picks.
- ``admin``: pages of the metrics port.
- ``settings``: every flag, to and from argv and the environment.
- ``model_header``: the role of a filter that names the body's model in a header.
- ``sidecars``: programs that run beside an engine or before it, from the same image.
- ``compat``: configuration of other routers, translated to the picker's settings.
- ``names``: names on the wire and on Kubernetes objects.
- ``errors``: exceptions of the picker.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvist")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"
