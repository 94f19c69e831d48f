"""OpenTelemetry traces of picks: the context taken from requests, the spans, and their export over OTLP.

Off unless ``--trace-endpoint`` (or OpenTelemetry's own variable) names a collector. Spans are made of the
stage times that are measured anyway, after the answer, and for sampled requests only. Prompt text is in no
span.

- ``trace_context``: W3C Trace Context, sampling, and the picks that wait for their export.
- ``pick_spans``: one pick as OTLP messages.
- ``destination``: the collector, by the flags and OpenTelemetry's variables.
- ``exporter``: sends spans over HTTP or gRPC, with retries, within a bounded queue.
"""
