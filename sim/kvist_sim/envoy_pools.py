"""One Envoy before several pools: routes choose the pool by the body's model, the pool's picker the endpoint.

Two ext_proc filters in one chain: the first asks ``kvist-epp --role=model-header``, which sets the header and
has the route chosen anew; the second asks the picker of the pool that the route names. Each pool's clusters
and filter are those of `envoy.config`. Type names and fields: Envoy's v3 API (1.40).
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from kvist_epp.names import BASE_MODEL_HEADER, MODEL_HEADER
from kvist_sim.envoy import Gateway, Json, Mode, config
from kvist_sim.envoy_settings import PickerTls

MODEL_FILTER: Final = "kvist.model-header"
PICKER_FILTER: Final = "kvist.picker"
MODEL_TIMEOUT: Final = "5s"
"""Time-out of the model filter, which never queues; the picker may queue requests."""

_TYPE: Final = "type.googleapis.com/envoy."
_MODEL_CLUSTER: Final = "model-header"
_OF_A_POOL: Final = ("pool", "picker")
"""Clusters that each pool has of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Engines that serve one model, and their pickers."""

    endpoints: Sequence[str]
    """Addresses as "ip:port"."""
    pickers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Models and their pools."""

    models: tuple[str, ...]
    """Values of ``header``."""
    pools: Mapping[str, int]
    """Weights by pool; a single pool takes all."""
    header: str = MODEL_HEADER


@dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """Pools behind one Envoy."""

    pools: Mapping[str, Pool]
    routes: Sequence[Route]
    default: str
    """Pool of requests without a route: no model, an unknown one, or no filter that reads it."""
    model_headers: tuple[str, ...]
    """Replicas of ``kvist-epp --role=model-header``: "ip:port" each."""
    tls: PickerTls | None = None
    """TLS to all pickers; ``None`` = plaintext."""
    mode: Mode = "buffered"
    model_failure_mode_allow: bool = True
    """Send every request to ``default`` without the filter; otherwise requests fail."""
    port: int = 0
    gateway: Mapping[str, bool] = field(default_factory=dict)
    """Further fields of every pool's ``Gateway``."""


def pools_config(pools: Pools) -> Json:
    """Return the bootstrap as a dict; its JSON is what ``envoy -c`` reads."""
    each = {name: _parts(pools, pool.endpoints, pool.pickers) for name, pool in pools.pools.items()}
    return joined(pools, each, _parts(pools, (), pools.model_headers))


def joined(pools: Pools, each: Mapping[str, Json], teller: Json) -> Json:
    """One configuration of those that each pool has by itself, its clusters ``pool`` and ``picker``; of
    ``teller`` its ``picker``, which is the model header's."""
    bootstrap = copy.deepcopy(each[pools.default])
    connections = _connections(bootstrap)
    connections.setdefault("early_header_mutation_extensions", []).append(_no_forged_header())
    connections["http_filters"] = [
        _model_filter(pools, _ext_proc(teller)),
        _picker_filter(_ext_proc(each[pools.default]), pools.default),
        connections["http_filters"][-1],
    ]
    connections["access_log"] = [_log(name, part) for name, part in each.items()]
    [host] = connections["route_config"]["virtual_hosts"]
    [last] = host["routes"]
    host["routes"] = [_route(route, model, last, each) for route in pools.routes for model in route.models]
    host["routes"].append(_route(Route(models=(), pools={pools.default: 1}), "", last, each))
    clusters = [
        _renamed(_clusters(part)[kind], name if kind == "pool" else f"{name}-{kind}")
        for name, part in each.items()
        for kind in _OF_A_POOL
    ]
    clusters.append(_renamed(_clusters(teller)["picker"], _MODEL_CLUSTER))
    clusters += [c for kind, c in _clusters(bootstrap).items() if kind not in _OF_A_POOL]
    bootstrap["static_resources"]["clusters"] = clusters
    return bootstrap


def _parts(pools: Pools, endpoints: Sequence[str], pickers: tuple[str, ...]) -> Json:
    """Return the configuration of one pool alone, to take parts from."""
    return config(
        Gateway(
            endpoints=endpoints,
            pickers=pickers,
            picker_tls=pools.tls,
            mode=pools.mode,
            port=pools.port,
            **pools.gateway,  # type: ignore[arg-type]
        )
    )


def _model_filter(pools: Pools, settings: Json) -> Json:
    settings["grpc_service"]["envoy_grpc"]["cluster_name"] = _MODEL_CLUSTER
    settings |= {"message_timeout": MODEL_TIMEOUT, "failure_mode_allow": pools.model_failure_mode_allow}
    del settings["metadata_options"]
    return {"name": MODEL_FILTER, "typed_config": settings}


def _picker_filter(settings: Json, pool: str) -> Json:
    settings["grpc_service"] = _service(settings, pool)
    return {"name": PICKER_FILTER, "typed_config": settings}


def _service(settings: Json, pool: str) -> Json:
    found: Json = settings["grpc_service"]
    return found | {"envoy_grpc": {"cluster_name": f"{pool}-picker"}}


def _route(route: Route, model: str, like: Json, each: Mapping[str, Json]) -> Json:
    """``like``: the one route of a pool by itself: its time-out and retries."""
    made = copy.deepcopy(like)
    if model:
        made["match"]["headers"] = [{"name": route.header, "string_match": {"exact": model}}]
    del made["route"]["cluster"]
    if len(route.pools) == 1:
        [pool] = route.pools
        made["route"]["cluster"] = pool
        made["typed_per_filter_config"] = _asks(each[pool], pool)
        return made
    made["route"]["weighted_clusters"] = {
        "clusters": [
            {"name": pool, "weight": weight, "typed_per_filter_config": _asks(each[pool], pool)}
            for pool, weight in route.pools.items()
        ]
    }
    return made


def _asks(part: Json, pool: str) -> Json:
    """Return the route's setting that names this pool's picker."""
    kind = f"{_TYPE}extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    return {PICKER_FILTER: {"@type": kind, "overrides": {"grpc_service": _service(_ext_proc(part), pool)}}}


def _no_forged_header() -> Json:
    """Before anything else, so that it holds while the filter is down too."""
    kind = f"{_TYPE}extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation"
    return {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": {
            "@type": kind,
            "mutations": [{"remove": MODEL_HEADER}, {"remove": BASE_MODEL_HEADER}],
        },
    }


def _log(pool: str, part: Json) -> Json:
    """Return an access log that reports the pool's requests to its picker."""
    log: Json = copy.deepcopy(_connections(part)["access_log"][0])
    log["typed_config"]["common_config"]["grpc_service"] = {"envoy_grpc": {"cluster_name": f"{pool}-picker"}}
    kind = f"{_TYPE}extensions.access_loggers.filters.cel.v3.ExpressionFilter"
    expression = {"@type": kind, "expression": f"xds.cluster_name == '{pool}'"}
    log["filter"] = {
        "extension_filter": {
            "name": "envoy.access_loggers.extension_filters.cel",
            "typed_config": expression,
        }
    }
    return log


def _connections(bootstrap: Json) -> Json:
    chain = bootstrap["static_resources"]["listeners"][0]["filter_chains"][0]
    found: Json = chain["filters"][0]["typed_config"]
    return found


def _ext_proc(bootstrap: Json) -> Json:
    found: Json = copy.deepcopy(_connections(bootstrap)["http_filters"][0]["typed_config"])
    return found


def _clusters(bootstrap: Json) -> dict[str, Json]:
    return {cluster["name"]: cluster for cluster in bootstrap["static_resources"]["clusters"]}


def _renamed(cluster: Json, name: str) -> Json:
    assignment = cluster["load_assignment"] | {"cluster_name": name}
    return cluster | {"name": name, "load_assignment": assignment}
