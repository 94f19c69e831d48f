"""Pools, facts and plans for tests."""

from functools import cache
from typing import Any

from kvist_operator.models.catalogue import from_catalogue
from kvist_operator.models.shape import Facts, read_shape
from kvist_operator.plan import Plan, make_plan
from kvist_operator.spec import Pool, read_pool

DENSE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
"""Llama 3.1 8B."""


def resource(source: str = "hf://Qwen/Qwen3-8B", **spec: Any) -> dict[str, Any]:
    """Return a pool as parsed from YAML; ``model`` in the spec adds to the source."""
    model = {"source": source, **spec.pop("model", {})}
    return {
        "apiVersion": "kvist.dev/v1alpha1",
        "kind": "InferencePool",
        "metadata": {"name": "twig", "namespace": "forest"},
        "spec": {"model": model, **spec},
    }


def pool(source: str = "hf://Qwen/Qwen3-8B", **spec: Any) -> Pool:
    """Return a pool as frozen data."""
    return read_pool(resource(source, **spec))


@cache
def known(name: str) -> Facts:
    """Return the facts of a model of the catalogue."""
    found = from_catalogue(name)
    assert found is not None, name
    return found


def made(**config: Any) -> Facts:
    """Return the facts of a model like Llama 3.1 8B, with other keys."""
    return Facts(shape=read_shape({**DENSE, **config}), source="test")


def plan(name: str, gpu: str, **spec: Any) -> Plan:
    """Return the plan for a model of the catalogue."""
    return make_plan(pool(f"hf://{name}", **spec), known(name), gpu=gpu)


def chosen(found: Plan, field: str) -> Any:
    """Return the value of one choice."""
    return next(choice.value for choice in found.choices if choice.field == field)


def reason(found: Plan, field: str) -> str:
    """Return the reason of one choice."""
    return next(choice.reason for choice in found.choices if choice.field == field)


def plan_made(config: dict[str, Any], gpu: str, **spec: Any) -> Plan:
    """Return the plan for a model like Llama 3.1 8B, with other keys."""
    return make_plan(pool("hf://acme/model", **spec), made(**config), gpu=gpu)
