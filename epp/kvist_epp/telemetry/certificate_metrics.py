"""What the ext_proc port's certificate has to say."""

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def families(found: Mapping[str, float]) -> Iterable[Metric]:
    """``found``: ``Certificates.counters``, empty without TLS; then they have no series."""
    text = "When the certificate in use expires, Unix time; absent without TLS."
    expiry = GaugeMetricFamily("kvist_epp_certificate_expiry_timestamp_seconds", text, labels=[])
    text = "New certificates, keys or authorities found, by what became of them."
    changes = CounterMetricFamily("kvist_epp_certificate_changes", text, labels=["outcome"])
    if found:
        expiry.add_metric([], found["expires"])
        for outcome in ("taken", "refused"):
            changes.add_metric([outcome], int(found[outcome]))
    yield from (expiry, changes)
