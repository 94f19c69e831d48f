"""PodMonitors of the Prometheus operator, one for each kind of pod. Pure."""

from kvist_operator.spec.pool import Pool

from .cluster_facts import Api, Json, Note, Site
from .object_names import ENGINE, ENVOY, PICKER, ObjectNames


def monitoring(pool: Pool, site: Site) -> list[Json]:
    """Nothing where they are not wanted, or their API is not there."""
    if pool.pod_monitor == "Disabled" or Api.POD_MONITOR not in site.apis:
        return []
    names = ObjectNames.of(pool)
    found = [_monitor(names, names.engine, ENGINE, names.served, "http", "/metrics")]
    if pool.picker.mode != "Off":
        found.append(_monitor(names, names.picker, PICKER, names.selector(PICKER), "metrics", "/metrics"))
    if pool.gateway.mode == "Envoy":
        selector = names.selector(ENVOY)
        found.append(_monitor(names, names.envoy, ENVOY, selector, "status", "/stats/prometheus"))
    return found


def unmonitored(pool: Pool, site: Site) -> list[Note]:
    """Said only where PodMonitors were asked for."""
    if pool.pod_monitor != "Enabled" or Api.POD_MONITOR in site.apis:
        return []
    return [
        Note(
            "Monitored",
            "ApiMissing",
            f"{Api.POD_MONITOR} is not installed: install it, or set spec.monitoring.podMonitor: Auto",
        )
    ]


def _monitor(
    names: ObjectNames, name: str, component: str, selector: dict[str, str], port: str, path: str
) -> Json:
    """``pool`` becomes a label of every series: queries and autoscalers go by it."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": names.meta(name, component),
        "spec": {
            "selector": {"matchLabels": selector},
            "podMetricsEndpoints": [
                {
                    "port": port,
                    "path": path,
                    "interval": "15s",
                    "relabelings": [{"targetLabel": "pool", "replacement": names.pool, "action": "replace"}],
                }
            ],
        },
    }
