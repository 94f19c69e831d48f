"""Dashboards and alerts of kvist, defined once in code; ``make docs`` writes what the chart ships.

Nothing here runs in the picker or the operator, and no wheel contains it.

- ``rules``: the words of the definition (``Alert``, ``Record``, ``Case``), and the files made of them: rules
  for Prometheus, their tests for promtool, rules in quick motion for tests.
- ``alerts``: every alert and recording rule, with the series that make it fire and those that do not.
- ``panels``: the words of a dashboard (``Panel``, ``Query``, ``Dashboard``), and Grafana's JSON made of them.
- ``dashboards``: the five dashboards.
- ``promql``: metrics and labels that an expression names.
- ``generate``: the files that are made of all this, by path.
"""
