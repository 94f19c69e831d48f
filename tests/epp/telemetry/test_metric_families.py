"""Metrics of the gRPC ports: how full they are, and what they refused."""

from tests.epp.http2.h2 import RECORD, Client, data, message

from kvist_epp.http2.port_stats import CONNECTION_ENDS, STREAM_ENDS, PortLoad, PortStats
from kvist_epp.telemetry.picker_metrics import PickerMetrics


def page(metrics: PickerMetrics) -> list[str]:
    """Return the lines of the page about ports."""
    text, _ = metrics.snapshot().format("")
    return [line for line in text.decode().splitlines() if line.startswith("kvist_epp_http2_")]


def test_every_reason_is_there_from_the_start() -> None:
    """A rate sees the first end of each kind, because its series begins at zero."""
    metrics = PickerMetrics()
    metrics.ports["grpc"] = PortStats(1000)
    lines = page(metrics)
    for name, reasons in (("connections", CONNECTION_ENDS), ("streams", STREAM_ENDS)):
        for reason in reasons:
            assert f'kvist_epp_http2_{name}_ended_total{{port="grpc",reason="{reason}"}} 0.0' in lines


def test_ends_and_loads_are_counted_by_port() -> None:
    """Counters and gauges of one port do not change with those of another."""
    metrics = PickerMetrics()
    load = PortLoad(connections=1, streams=2, receiving_bytes=3, unsent_bytes=4)
    one, other = PortStats(1000, lambda: load), PortStats(1000)
    metrics.ports.update({"grpc": one, "peer": other})
    client = Client(stats=one)
    client.send(client.request(1, RECORD), data(1, message(bytes(2000))))
    lines = page(metrics)
    assert 'kvist_epp_http2_streams_ended_total{port="grpc",reason="held-bytes"} 1.0' in lines
    assert 'kvist_epp_http2_streams_ended_total{port="peer",reason="held-bytes"} 0.0' in lines
    assert 'kvist_epp_http2_connections{port="grpc"} 1.0' in lines
    assert 'kvist_epp_http2_streams{port="grpc"} 2.0' in lines
    assert 'kvist_epp_http2_held_bytes{kind="receiving",port="grpc"} 3.0' in lines
    assert 'kvist_epp_http2_held_bytes{kind="unsent",port="grpc"} 4.0' in lines
