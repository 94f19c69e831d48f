"""Which endpoints serve a model's name, where not all do. Pure.

LoRA adapters are often loaded on some engines only; the others answer 404 for their names. A name that no
engine lists is nobody's to decide: it is routed like any other, and the engine answers.
"""

from collections.abc import Iterable, Mapping

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.engines.vllm.engine_metrics import Served


def partly_served(engines: Iterable[tuple[Endpoint, Served]]) -> Mapping[str, tuple[str, ...]]:
    """By name: the ``ip:port`` of each endpoint that lists it; names that all of them list are left out.

    Engines that do not tell what they serve (``/v1/models`` behind a key) count neither way.
    """
    told = [(endpoint, served.models | served.adapters) for endpoint, served in engines if served.models]
    by_name: dict[str, list[str]] = {}
    for endpoint, names in told:
        for name in names:
            by_name.setdefault(name, []).append(endpoint.hostport)
    return {name: tuple(hosts) for name, hosts in by_name.items() if len(hosts) < len(told)}
