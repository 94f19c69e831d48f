"""What the gRPC ports say of themselves: ``kvist_epp_http2_…`` and ``kvist_epp_tls_…``, one series for each
port and reason."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvist_epp.http2.port_stats import Tally


def families(ports: Mapping[str, Tally]) -> Iterable[Metric]:
    """Metrics of each port by its name."""
    loads = {name: tally.load() for name, tally in ports.items()}
    connections = _gauge("connections", "Open connections.")
    streams = _gauge("streams", "Open streams: requests, health watches, access logs.")
    held = _gauge("held_bytes", "Requests half received or not answered, and answers not read.", "kind")
    for name, load in loads.items():
        connections.add_metric([name], load.connections)
        streams.add_metric([name], load.streams)
        held.add_metric([name, "receiving"], load.receiving_bytes)
        held.add_metric([name, "unsent"], load.unsent_bytes)
    yield from (connections, streams, held)
    text = "Connections ended or turned away by the picker."
    yield _ends("connections_ended", text, {name: tally.connections_ended for name, tally in ports.items()})
    text = "Streams ended or turned away by the picker, their connection not."
    yield _ends("streams_ended", text, {name: tally.streams_ended for name, tally in ports.items()})
    text = "TLS handshakes that failed, in OpenSSL's words."
    counts = {name: tally.refusals.counts for name, tally in ports.items()}
    yield _counter("kvist_epp_tls_refusals", text, counts)


def _gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"kvist_epp_http2_{name}", text, labels=["port", *labels])


def _ends(name: str, text: str, ends: Mapping[str, Mapping[str, int]]) -> Metric:
    return _counter(f"kvist_epp_http2_{name}", text, ends)


def _counter(name: str, text: str, ends: Mapping[str, Mapping[str, int]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=["port", "reason"])
    for port, reasons in ends.items():
        for reason, count in reasons.items():
            family.add_metric([port, reason], count)
    return family
