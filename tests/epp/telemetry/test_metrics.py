"""The metrics page and its families."""

import re

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from tests.epp.http2.h2 import RECORD, Client, data, message

from kvist_epp.http2.limits import CONNECTION_ENDS, STREAM_ENDS, PortLoad, PortStats
from kvist_epp.telemetry.counters import Stages
from kvist_epp.telemetry.metrics import Gauges, PickerMetrics


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


Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(metrics: PickerMetrics) -> Samples:
    body, content_type = metrics.snapshot().format("")
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.name.startswith("kvist_epp_")
    }


def filled() -> PickerMetrics:
    metrics = PickerMetrics(version="1.2")
    metrics.requests["picked"] += 2
    metrics.predicted_cached["ns/a"] += 100
    metrics.true_cached["ns/a"] += 90
    metrics.events["ns/a", "stored"] += 7
    metrics.gaps["ns/a"] += 1
    metrics.resets["ns/a"] += 2
    metrics.undecodable["ns/a"] += 3
    metrics.ended["access-log"] += 4
    metrics.bad_endpoints_files = 5
    metrics.template_failures["shape"] = 6
    metrics.gauges = Gauges(
        index_blocks=lambda: {"ns/a": {"GPU": 10, "CPU": 20}},
        precise=lambda: {"ns/a": 1},
        backlog_tokens=lambda: {"ns/a": 300},
        endpoints=lambda: {"ready": 1, "unreachable": 0},
        queue_requests=lambda: {"0": 3, "-1": 0},
        queue_tokens=lambda: 900,
        queue_bytes=lambda: 20_000,
        full_endpoints=lambda: 1,
        backlog_seconds=lambda: 2.5,
        model_faithful=lambda: True,
        log_dropped=lambda: 8,
    )
    return metrics


def test_every_name_others_rely_on() -> None:
    """Names and labels are those of the fixed interface, and values those that were counted."""
    a = ("endpoint", "ns/a")
    found = samples(filled())
    expected: Samples = {
        ("kvist_epp_build_info", (("version", "1.2"),)): 1,
        ("kvist_epp_requests_total", (("outcome", "picked"),)): 2,
        ("kvist_epp_predicted_cached_tokens_total", (a,)): 100,
        ("kvist_epp_true_cached_tokens_total", (a,)): 90,
        ("kvist_epp_index_events_total", (a, ("type", "stored"))): 7,
        ("kvist_epp_index_gaps_total", (a,)): 1,
        ("kvist_epp_index_resets_total", (a,)): 2,
        ("kvist_epp_index_undecodable_total", (a,)): 3,
        ("kvist_epp_index_blocks", (a, ("medium", "GPU"))): 10,
        ("kvist_epp_index_blocks", (a, ("medium", "CPU"))): 20,
        ("kvist_epp_index_trust", (a,)): 1,
        ("kvist_epp_backlog_tokens", (a,)): 300,
        ("kvist_epp_endpoints", (("state", "ready"),)): 1,
        ("kvist_epp_endpoints", (("state", "unreachable"),)): 0,
        ("kvist_epp_model_faithful", ()): 1,
        ("kvist_epp_bad_endpoints_files_total", ()): 5,
        ("kvist_epp_template_failures_total", (("reason", "shape"),)): 6,
        ("kvist_epp_requests_ended_total", (("source", "access-log"),)): 4,
        ("kvist_epp_requests_ended_total", (("source", "expired"),)): 0,
        ("kvist_epp_requests_ended_total", (("source", "left"),)): 0,
        ("kvist_epp_requests_ended_total", (("source", "reconciled"),)): 0,
        ("kvist_epp_log_lines_dropped_total", ()): 8,
        ("kvist_epp_queue_requests", (("priority", "0"),)): 3,
        ("kvist_epp_queue_requests", (("priority", "-1"),)): 0,
        ("kvist_epp_queue_tokens", ()): 900,
        ("kvist_epp_queue_bytes", ()): 20_000,
        ("kvist_epp_full_endpoints", ()): 1,
        ("kvist_epp_backlog_seconds", ()): 2.5,
    }

    assert {key: found.get(key) for key in expected} == expected


def test_stages_become_histograms() -> None:
    """Each stage has its histogram, and the pick has the sum of them."""
    metrics, stages = PickerMetrics(), Stages()
    stages.laps += [("parse", 0.002), ("match", 0.5)]
    metrics.observe(stages)
    found = samples(metrics)

    assert found["kvist_epp_stage_seconds_count", (("stage", "parse"),)] == 1
    assert found["kvist_epp_stage_seconds_sum", (("stage", "match"),)] == 0.5
    assert found["kvist_epp_stage_seconds_bucket", (("le", "0.0025"), ("stage", "parse"))] == 1
    assert found["kvist_epp_pick_seconds_sum", ()] == 0.502
    assert found["kvist_epp_pick_seconds_bucket", (("le", "+Inf"),)] == 1


def test_series_of_an_endpoint_that_left_are_dropped() -> None:
    """Endpoints that come and go do not grow the page."""
    metrics = filled()
    metrics.gauges = Gauges()
    metrics.forget("ns/a")
    metrics.forget("ns/never")

    assert [key for key in samples(metrics) if "endpoint" in dict(key[1])] == []


def test_a_fresh_picker_has_a_page() -> None:
    """At the start the page is valid, and pick_seconds is present and empty."""
    assert samples(PickerMetrics())["kvist_epp_pick_seconds_count", ()] == 0


def test_the_process_is_measured() -> None:
    """CPU time and memory of the picker's own process are on its page."""
    body, _ = PickerMetrics().snapshot().format("")

    assert b"process_cpu_seconds_total" in body


def test_openmetrics_on_request() -> None:
    """A scraper that asks for OpenMetrics gets it."""
    body, content_type = filled().snapshot().format("application/openmetrics-text; version=1.0.0")

    assert (content_type.split(";")[0], body.endswith(b"# EOF\n")) == ("application/openmetrics-text", True)


OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def exemplars(metrics: PickerMetrics) -> dict[str, dict[str, str]]:
    """Return the labels of the exemplars in the OpenMetrics page, by the name of their metric."""
    body, _ = metrics.snapshot().format(OPENMETRICS)
    return {
        family.name: sample.exemplar.labels
        for family in parse_openmetrics(body.decode())  # type: ignore[no-untyped-call]
        for sample in family.samples
        if sample.exemplar is not None
    }


def test_exemplars_name_requests() -> None:
    """A scraper that asks for OpenMetrics finds the id of a request, and of its trace, with each bucket."""
    metrics = PickerMetrics()
    metrics.observe(Stages(), "a request")
    metrics.queue_waits["picked"].observe(0.5, "waited", "4bf92f3577b34da6a3ce929d0e0e4736")
    metrics.first_token.observe(0.2, "streamed")

    assert exemplars(metrics) == {
        "kvist_epp_pick_seconds": {"request_id": "a request"},
        "kvist_epp_queue_seconds": {
            "request_id": "waited",
            "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        },
        "kvist_epp_time_to_first_token_seconds": {"request_id": "streamed"},
    }


def test_the_plain_format_has_no_exemplars() -> None:
    """Prometheus' text format is the same with exemplars as without them."""
    pages = []
    for request_id in ("", "id"):
        metrics = PickerMetrics()
        metrics.first_token.observe(0.2, request_id)
        text, _ = metrics.snapshot().format("text/plain")
        pages.append([line for line in text.decode().splitlines() if "kvist_epp_" in line])

    assert pages[0] == pages[1]


@pytest.mark.parametrize("request_id", ["x" * 65, 'a\n# {b="c"} 1', "\udcff", "\u0661", "\x7f"])
def test_an_id_that_breaks_the_page_is_left_out(request_id: str) -> None:
    """Clients may choose request ids: one that is too long, or more than a line of ASCII, is no exemplar."""
    metrics = PickerMetrics()
    metrics.first_token.observe(0.2, request_id)

    assert exemplars(metrics) == {}


def test_each_help_text_is_one_sentence_with_its_unit() -> None:
    """A HELP text begins with the unit of its values and is one sentence of plain English."""
    page, _ = filled().snapshot().format("")
    seconds = ("Seconds ", "Mean seconds ", "Total seconds ", "Time at which ")
    units = ("Number of ", "Ratio of ", "Bytes ", "1 ", *seconds)
    texts = {
        family.name: family.documentation
        for family in text_string_to_metric_families(page.decode())
        if family.name.startswith("kvist_epp_") and family.name != "kvist_epp_build_info"
    }
    odd = {name: text for name, text in texts.items() if not re.fullmatch(r"[^.]+\.", text)}

    assert {name: text for name, text in texts.items() if not text.startswith(units)} == {}
    assert odd == {}
    assert len(texts) > 40


def test_a_page_shows_the_values_that_were_read() -> None:
    """A page has the values that were read, not what is counted while another thread formats it."""
    metrics = filled()
    page = metrics.snapshot()
    assert sum(1 for _ in page.read()) > 50
    before, _ = page.format("")
    metrics.requests["picked"] += 1
    metrics.predicted_cached["10.0.0.9:80"] += 1
    metrics.pick.observe(0.001)
    after, _ = page.format("")
    assert without_process(before) == without_process(after)
    assert without_process(metrics.snapshot().format("")[0]) != without_process(before)


def test_values_are_read_when_the_page_is_formatted_at_the_latest() -> None:
    """A page that was not read in steps has all families all the same."""
    metrics = filled()
    page = metrics.snapshot()
    for _ in page.read():
        pass
    assert without_process(page.format("")[0]) == without_process(metrics.snapshot().format("")[0])


def without_process(body: bytes) -> list[bytes]:
    """Return the lines without the figures of the test's own process."""
    return [line for line in body.splitlines() if b"process_" not in line]
