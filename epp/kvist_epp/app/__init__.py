"""Start-up, listeners, readiness, shutdown and model loading: the only place that wires parts together."""
