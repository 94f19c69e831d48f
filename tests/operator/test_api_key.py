"""The engines' API key: a Secret that engines and pickers read, and nothing else repeats."""

import json
from typing import Any

import pytest
from tests.crd.cases import planned
from tests.operator.manifested import one, rendered, resource, text

from kvist_epp.settings.settings import Settings
from kvist_operator.errors import SpecError
from kvist_operator.spec import read_pool

REF = {"name": "twig-key", "key": "primary"}
Json = dict[str, Any]


def pod(name: str, **engine: Any) -> Json:
    """Return the pod of a Deployment of a pool with an API key."""
    found = rendered("minimal", engine={"apiKeySecretRef": REF, **engine})
    made: Json = one(found, "Deployment", name)["spec"]["template"]["spec"]
    return made


def test_engines_read_the_key_from_the_secret() -> None:
    """vLLM gets the key as VLLM_API_KEY, by reference, and no argument mentions it."""
    [engine] = pod("twig")["containers"]
    ref = {"secretKeyRef": {"name": "twig-key", "key": "primary"}}

    assert {"name": "VLLM_API_KEY", "valueFrom": ref} in engine["env"]
    assert "key" not in " ".join(engine["args"])


def test_the_picker_reads_it_from_a_file_that_follows_the_secret() -> None:
    """The picker's file is in a volume of the Secret and not a single mounted file, which the kubelet would
    never update; a missing Secret does not keep the picker from starting."""
    made = pod("twig-epp")
    [picker] = made["containers"]
    [volume] = [each["secret"] for each in made["volumes"] if each["name"] == "engine-key"]
    [mount] = [each for each in picker["volumeMounts"] if each["name"] == "engine-key"]

    assert volume == {
        "secretName": "twig-key",
        "items": [{"key": "primary", "path": "primary"}],
        "optional": True,
    }
    assert (mount["readOnly"], "subPath" in mount) == (True, False)
    assert Settings.from_args(picker["args"]).engine_key_file == f"{mount['mountPath']}/primary"
    assert "VLLM_API_KEY" not in {entry["name"] for entry in picker["env"]}


def test_without_a_key_nothing_changes() -> None:
    """A pool without the field has neither the variable nor the volume; the default key is api-key."""
    assert "engine-key" not in text(rendered("minimal"))
    assert "VLLM_API_KEY" not in text(rendered("minimal"))
    made = read_pool(
        resource("minimal")
        | {"spec": resource("minimal")["spec"] | {"engine": {"apiKeySecretRef": {"name": "a"}}}}
    )
    assert made.engine.api_key is not None
    assert made.engine.api_key.key == "api-key"


def test_the_plan_does_not_depend_on_the_key() -> None:
    """The plan, its arguments and its hash are those of a pool without a key."""
    keyed = resource("minimal")
    keyed["spec"]["engine"] = {"apiKeySecretRef": REF}
    plain, found = planned(resource("minimal")), planned(keyed)

    assert (found.argv, found.hash) == (plain.argv, plain.hash)
    assert "twig-key" not in json.dumps(found.to_dict())


@pytest.mark.parametrize(
    ("engine", "field"),
    [
        ({"env": [{"name": "VLLM_API_KEY", "value": "$(OTHER)"}]}, "spec.engine.env[0]"),
        ({"extraArgs": ["--api-key", "$(OTHER)"]}, "spec.engine.extraArgs"),
        ({"extraArgs": ["--api-key=$(OTHER)"]}, "spec.engine.extraArgs"),
    ],
)
def test_a_second_key_is_refused(engine: Json, field: str) -> None:
    """Engines would take another key than the picker: the message names both fields."""
    with pytest.raises(SpecError) as refused:
        pod("twig", **engine)

    assert refused.value.field == field
    assert "spec.engine.apiKeySecretRef: leave one of them out" in str(refused.value)
