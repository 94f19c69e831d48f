"""Metrics and logs of the picker.

Counters are plain numbers that the hot path increments; they become Prometheus families only when the page is
read. Log lines go through a bounded queue and a thread, so that a slow reader of stderr never blocks the
picker.

- ``metrics``: all counters of the picker, the gauges read at each scrape, and the metrics page.
- ``families``: families of Prometheus made of plain numbers, and those that several roles have.
- ``counters``: cheap histograms with exemplars, the time of each stage of a pick, counters of replication
  and prewarming.
- ``request_log``: one line per request, log records in the same form, and the writer of both.
"""
