"""Requests go to endpoints that serve what they name."""

from collections.abc import Mapping
from typing import Any

import pytest
from tests.epp.parts import ask, chat, make

from kvist_epp.errors import NoEndpoints
from kvist_epp.extproc.pick_request import PickResult

HOSTS = ["10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000"]


def _endpoints(model: str, partly: Mapping[str, tuple[str, ...]], **more: Any) -> tuple[str, ...]:
    parts = make(3)
    parts.director.partly_served = partly
    decision = parts.decide(ask(chat("hello") | {"model": model}, **more))
    assert isinstance(decision, PickResult)
    return decision.endpoints


def test_an_adapter_goes_only_where_it_is_loaded() -> None:
    """Neither the pick nor the endpoints for retries are ones that do not serve it."""
    partly = {"lora": (HOSTS[0], HOSTS[2])}

    assert sorted(_endpoints("lora", partly)) == [HOSTS[0], HOSTS[2]]
    assert sorted(_endpoints("base", partly)) == HOSTS


def test_an_unserved_model_name_is_routed() -> None:
    """The engine has the word: it answers 404, or knows the name from a moment ago."""
    assert sorted(_endpoints("unheard-of", {"lora": (HOSTS[0],)})) == HOSTS


@pytest.mark.parametrize(
    ("subset", "wanted"),
    [
        (("10.0.0.1", "10.0.0.2"), [HOSTS[0]]),
        (("10.0.0.3:8000",), [HOSTS[2]]),
        (("10.0.0.1:9999", "10.0.0.3"), [HOSTS[2]]),
    ],
)
def test_the_gateways_subset_still_holds(subset: tuple[str, ...], wanted: list[str]) -> None:
    """A request goes only to endpoints of the gateway's subset that serve the model."""
    assert sorted(_endpoints("lora", {"lora": (HOSTS[0], HOSTS[2])}, subset=subset)) == wanted


@pytest.mark.parametrize("subset", [("10.0.0.2",), ("10.0.0.1:1",), ()])
def test_a_subset_without_the_model_is_refused(subset: tuple[str, ...]) -> None:
    """If no endpoint of the gateway's subset serves the model, the answer is 503."""
    with pytest.raises(NoEndpoints):
        _endpoints("lora", {"lora": (HOSTS[0], HOSTS[2])}, subset=subset)


def test_explain_names_the_endpoints_that_do_not_serve_the_model() -> None:
    """``/debug/pick`` shows the endpoints without the model as not eligible."""
    parts = make(2)
    parts.director.partly_served = {"lora": (HOSTS[1],)}
    document = parts.explain(ask(chat("x") | {"model": "lora"}).body)
    rows = document["endpoints"]

    assert isinstance(rows, list)
    assert [(row["endpoint"], row["eligible"]) for row in rows] == [(HOSTS[1], True), (HOSTS[0], False)]
