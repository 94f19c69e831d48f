"""Names of models and adapters that not every endpoint serves."""

from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.endpoints.served_models import partly_served
from kvist_epp.engines.vllm.engine_metrics import Served


def _engine(number: int, *adapters: str, models: tuple[str, ...] = ("base",)) -> tuple[Endpoint, Served]:
    endpoint = Endpoint(f"e{number}", "t", f"10.0.0.{number}", 8000)
    return endpoint, Served(models=frozenset(models), adapters=frozenset(adapters))


def test_a_name_that_some_serve_has_its_endpoints() -> None:
    """An adapter on two of three engines names the two; one on all, and the base model, name nobody."""
    engines = [
        _engine(1, "all", "some"),
        _engine(2, "all"),
        _engine(3, "all", "some", models=("base", "other")),
    ]

    assert partly_served(engines) == {
        "some": ("10.0.0.1:8000", "10.0.0.3:8000"),
        "other": ("10.0.0.3:8000",),
    }


def test_engines_that_do_not_tell_count_neither_way() -> None:
    """Where ``/v1/models`` cannot be read, nothing is known, and nothing is held against the engine."""
    silent = _engine(9, models=())

    assert partly_served([silent, _engine(1, "a"), _engine(2, "a")]) == {}
    assert partly_served([silent, _engine(1, "a"), _engine(2)]) == {"a": ("10.0.0.1:8000",)}
    assert partly_served([silent]) == partly_served([]) == {}
