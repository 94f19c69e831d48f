"""Promises of the choice between kinds of accelerators: the cheapest that fits, and its neighbours."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.pools import chosen, known, pool, reason

from kvist_operator.errors import HardwareError, SpecError
from kvist_operator.hardware import find_accelerator
from kvist_operator.manifests import Site
from kvist_operator.manifests.pods import placing
from kvist_operator.node_labels import NodeFacts, node_kinds
from kvist_operator.plan import Plan, PlanVerdict, make_plan
from kvist_operator.plan.plan import differences
from kvist_operator.plan.selection import for_image
from kvist_operator.plan.size import WORTH, most_worth

LLAMA = "meta-llama/Llama-3.3-70B-Instruct"


def nodes(**kinds: int) -> list[NodeFacts]:
    """Return the kinds of a cluster: products with their number on a node, dashes as underscores."""
    return node_kinds(
        {"nvidia.com/gpu.product": f"NVIDIA-{name.replace('_', '-')}", "nvidia.com/gpu.count": str(number)}
        for name, number in kinds.items()
    )


T4 = node_kinds([{"nvidia.com/gpu.product": "Tesla-T4", "nvidia.com/gpu.count": "1"}])
MIG = node_kinds(
    [{"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "nvidia.com/gpu.memory": "9728"}]
)


def on(kinds: list[NodeFacts], model: str = "Qwen/Qwen3-8B", **more: Any) -> Plan:
    """Return the plan of a model in a cluster; ``prices`` and fields of the spec are further arguments."""
    prices = more.pop("prices", None)
    return make_plan(pool(f"hf://{model}", **more), known(model), nodes=kinds, prices=prices)


def test_a_larger_kind_of_node_is_found_behind_many_small_ones() -> None:
    """Twenty nodes with a T4 and four with eight H100 serve a 70B model on H100."""
    found = on([*T4, *nodes(H100_80GB_HBM3=8)], LLAMA)

    assert found.verdict is PlanVerdict.FITS
    assert (found.hardware.accelerator.name, found.layout.gpus) == ("H100-80GB", 4)
    assert "of H100-80GB, T4" in reason(found, "accelerator") or "of T4, H100-80GB" in reason(
        found, "accelerator"
    )


def test_the_smallest_kind_that_holds_the_wish_is_taken() -> None:
    """Without prices, total GPU memory orders the kinds."""
    assert on(nodes(H100_80GB_HBM3=8, L4=4, L40S=4)).hardware.accelerator.name == "L4"
    assert on(nodes(H100_80GB_HBM3=8, L40S=4)).hardware.accelerator.name == "L40S"
    assert on(nodes(L4=1, L40S=4)).hardware.accelerator.name == "L40S"  # one L4 holds a quarter of the wish


def test_prices_decide_where_they_are_known() -> None:
    """The price of a replica orders the kinds, and kinds without a price come after those with one."""
    both = nodes(H100_80GB_HBM3=8, L4=4)
    dear = on(both, prices={"L4": 3.0, "NVIDIA-H100-80GB-HBM3": 2.5})
    cheap = on(both, prices={"L4": 1.0, "H100": 2.5})
    one = on(both, prices={"H100-80GB": 9.0})

    assert dear.hardware.accelerator.name == "H100-80GB"
    assert (cheap.hardware.accelerator.name, cheap.price_per_hour) == ("L4", 2.0)
    assert (one.hardware.accelerator.name, one.price_per_hour) == ("H100-80GB", 9.0)
    assert "2.5 per hour" in reason(dear, "accelerator")
    assert dear.to_dict()["price_per_hour"] == 2.5
    assert on(both).to_dict()["price_per_hour"] is None


def test_priced_kinds_are_tried_where_nothing_else_names_one() -> None:
    """Prices name the kinds where neither product, nodes nor ``--gpu`` do; unknown names fail."""
    assert on([], prices={"L4": 0.7, "H100-80GB": 2.99}).hardware.accelerator.name == "L4"
    with pytest.raises(HardwareError, match="--price: 'X99' is not known"):
        on([], prices={"X99": 1.0})


def test_the_cheaper_neighbour_is_named_with_what_it_holds() -> None:
    """A plan with two GPUs says what one would hold and cost; the smallest one has no cheaper neighbour."""
    found = on(nodes(L4=4), prices={"L4": 0.7})
    [neighbour] = found.neighbours

    assert found.layout.gpus == 2
    held = int(10 * neighbour.sequences) / 10
    assert str(neighbour) == f"1 × L4 holds {held:g} of 8 sequences of 32,768 tokens, for 0.70 per hour"
    assert neighbour.cheaper
    assert found.to_dict()["neighbours"][0]["text"] == str(neighbour)
    assert on(nodes(H100_80GB_HBM3=8)).neighbours == ()


def test_a_plan_below_the_wish_names_the_dearer_neighbour() -> None:
    """A cheaper kind that holds nearly the whole wish is taken, and the dearer one is shown."""
    narrow = {"promptTokens": 32_000, "outputTokens": 700, "concurrency": 2}
    most = on(nodes(L4=1), workload=narrow).memory.concurrency(32_700) * 32_700
    wish = {"promptTokens": int(most / 2 / 0.97), "outputTokens": 1, "concurrency": 2}
    nearly = on(nodes(L4=1, H100_80GB_HBM3=8), workload=wish)

    assert chosen(nearly, "concurrency") == 1
    [dearer] = nearly.neighbours
    assert nearly.hardware.accelerator.name == "L4"
    assert str(dearer).startswith("1 × H100-80GB holds 2 of 2 sequences")
    assert not dearer.cheaper


def test_slices_and_shared_gpus_never_form_groups() -> None:
    """A model that one MIG slice does not hold is refused there, and never gets tensor parallelism."""
    small, large = on(MIG, "Qwen/Qwen3-0.6B"), on(MIG, "Qwen/Qwen3-32B")

    assert (small.layout.gpus, small.verdict) == (1, PlanVerdict.FITS)
    assert large.verdict is PlanVerdict.REFUSED
    assert large.layout.gpus == 1
    for spec, field in (
        ({"engine": {"tensorParallelSize": 2}}, "spec.engine.tensorParallelSize"),
        ({"engine": {"pipelineParallelSize": 2}}, "spec.engine.pipelineParallelSize"),
        ({"accelerator": {"count": 2}}, "spec.accelerator.count"),
    ):
        with pytest.raises(SpecError, match="cannot form a group") as refused:
            on(MIG, "Qwen/Qwen3-0.6B", **spec)
        assert str(refused.value).startswith(field)


def test_a_slice_that_the_spec_names_is_planned_as_one() -> None:
    """A product with the resource of a MIG slice has the slice's memory, not that of the whole GPU."""
    spec = {"product": "NVIDIA-H100-80GB-HBM3", "resourceName": "nvidia.com/mig-1g.10gb"}
    found = make_plan(pool("hf://Qwen/Qwen3-0.6B", accelerator=spec), known("Qwen/Qwen3-0.6B"))

    assert found.hardware.accelerator.memory_gib < 10
    assert found.to_dict()["accelerator"]["resource"] == "nvidia.com/mig-1g.10gb"
    assert found.layout.gpus == 1


def test_shared_gpus_come_last() -> None:
    """A GPU that other pods use is taken only where nothing else fits, and the plan is unverified."""
    shared = node_kinds([{"nvidia.com/gpu.product": "NVIDIA-L4-SHARED"}])

    assert on([*shared, *nodes(H100_80GB_HBM3=8)]).hardware.accelerator.name == "H100-80GB"
    alone = on([*shared, *MIG], "Qwen/Qwen3-8B")
    assert (alone.hardware.accelerator.name, alone.verdict) == ("L4-SHARED", PlanVerdict.UNVERIFIED)


def test_nodes_with_one_gpu_are_a_kind_of_their_own() -> None:
    """Mixed numbers of GPUs: tensor parallelism takes the nodes that have enough, a single GPU any."""
    mixed = nodes(L40S=1) + nodes(L40S=4)
    large = on(mixed, "Qwen/Qwen3-32B")

    assert on(mixed, "Qwen/Qwen3-0.6B").hardware.per_node == 1
    assert (large.hardware.per_node, large.nodes) == (4, 1)
    alone = on(nodes(L4=1), "Qwen/Qwen3-8B")
    assert (alone.layout.gpus, alone.layout.tensor) == (1, 1)


def test_one_node_comes_before_several_smaller_ones() -> None:
    """A model that needs pipeline stages over nodes of one kind takes one node of another."""
    assert on(nodes(L40S=1), "Qwen/Qwen3-32B").nodes > 1
    assert on(nodes(L40S=1, H200=8), "Qwen/Qwen3-32B").nodes == 1


def test_a_refusal_names_the_kind_that_lacks_least() -> None:
    """A refusal is about the kind that lacks least and says how many were tried."""
    found = on([*T4, *nodes(L4=1), *MIG], "meta-llama/Llama-3.1-405B-Instruct")

    assert found.verdict is PlanVerdict.REFUSED
    assert found.hardware.accelerator.name == "L4"
    assert "the best of 3 kinds of nodes" in found.refusal


def test_a_kind_that_cannot_do_what_the_spec_asks_is_passed_over() -> None:
    """FP8 weights rule out a T4, not the cluster; where no kind can, the error names the field."""
    engine = {"quantization": "FP8"}

    assert on([*T4, *nodes(L4=1)], engine=engine).hardware.accelerator.name == "L4"
    with pytest.raises(SpecError, match=r"spec\.engine\.quantization: T4 does not compute in FP8"):
        on(T4, engine=engine)


@pytest.mark.parametrize(
    ("model", "gpu", "said"),
    [
        (
            "openai/gpt-oss-20b",
            "T4",
            "compute capability 7.5, and vLLM's kernels for MXFP4 experts weights need 8.0",
        ),
        ("Qwen/Qwen3-32B-FP8", "V100-32GB", "need 7.5: choose a newer GPU"),
        ("deepseek-ai/DeepSeek-V3.2", "A100-80GB", "for sparse attention need 9.0"),
    ],
)
def test_gpus_older_than_the_kernels_are_refused_by_name(model: str, gpu: str, said: str) -> None:
    """Checkpoints whose kernels need a newer GPU are refused on older ones, and planned on another kind."""
    with pytest.raises(SpecError, match=said) as refused:
        make_plan(pool(f"hf://{model}"), known(model), gpu=gpu)

    assert str(refused.value).startswith("spec.accelerator.product: ")
    old = find_accelerator(gpu)
    assert old is not None
    both = [NodeFacts(old, 8), *nodes(H200=8)]
    assert on(both, model).hardware.accelerator.name == "H200-141GB"


def test_a_refusal_suggests_no_gpu_that_is_too_old() -> None:
    """The nearest configuration of a model with sparse attention has GPUs with kernels for it."""
    found = on(nodes(H100_80GB_HBM3=1), "zai-org/GLM-5-FP8")

    assert found.verdict is PlanVerdict.REFUSED
    assert "A100" not in found.nearest
    assert "would fit" in found.nearest


def test_a_pool_stays_where_it_was_planned_until_it_no_longer_fits() -> None:
    """A cheaper kind of node moves no running pool; a kind that does not fit any more is left."""
    before = [NodeFacts(facts.accelerator, facts.per_node, planned=True) for facts in nodes(H100_80GB_HBM3=8)]
    gone = [NodeFacts(facts.accelerator, facts.per_node, planned=True) for facts in T4]

    assert on([*before, *nodes(L4=4)]).hardware.accelerator.name == "H100-80GB"
    assert on([*gone, *nodes(H100_80GB_HBM3=8)], LLAMA).hardware.accelerator.name == "H100-80GB"


def test_kinds_are_those_that_the_image_is_for() -> None:
    """An image for ROCm runs on AMD, any other on NVIDIA, as long as the cluster has such nodes."""
    amd = node_kinds([{"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM"}])
    both = [*amd, *nodes(L4=1)]

    assert for_image(both, "rocm/vllm:v1") == amd
    assert for_image(both, "vllm/vllm-openai:v0.33.0") == nodes(L4=1)
    assert for_image(amd, "vllm/vllm-openai:v0.33.0") == amd


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            {"product": "L4", "memory": "96Gi"},
            r"spec\.accelerator\.memory: 96 GiB are more than L4 has \(22\.03 GiB\)",
        ),
        (
            {"product": "H100", "resourceName": "cpu"},
            r"spec\.accelerator\.resourceName: cpu is not a resource",
        ),
    ],
)
def test_memory_and_resources_that_a_card_does_not_have_are_refused(spec: dict[str, str], said: str) -> None:
    """The error names the field, what the card has, and the remedy."""
    with pytest.raises(SpecError, match=said):
        make_plan(pool(accelerator=spec), known("Qwen/Qwen3-8B"))


def affinity(kinds: list[NodeFacts], labels: list[dict[str, str]], model: str) -> list[Any]:
    """Return the terms by which the pods of a plan select nodes with these labels."""
    placed = placing(on(kinds, model), Site(node_labels=labels)).get("affinity") or {}
    required = (placed.get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return [
        (rule["key"], rule["values"]) for t in required["nodeSelectorTerms"] for rule in t["matchExpressions"]
    ]


def test_pods_select_the_nodes_of_their_kind_and_no_others() -> None:
    """Pods for a whole GPU keep off shared and divided ones, and those for a slice or for a card outside the
    table select the label that names it."""
    product = "nvidia.com/gpu.product"
    whole, shared = {product: "NVIDIA-L4"}, {product: "NVIDIA-L4-SHARED"}
    single = {product: "NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", "nvidia.com/gpu.memory": "9728"}
    mixed = {
        product: "NVIDIA-H100-80GB-HBM3",
        "nvidia.com/gpu.replicas": "0",
        "nvidia.com/mig-1g.10gb.count": "7",
        "nvidia.com/mig-1g.10gb.memory": "9984",
    }
    brand_new = {product: "NVIDIA-Brand-New", "nvidia.com/gpu.memory": "97871"}
    every = [whole, shared, single, mixed, brand_new]
    small = "Qwen/Qwen3-0.6B"

    assert affinity(node_kinds([whole]), every, small) == [(product, ["NVIDIA-L4"])]
    assert affinity(node_kinds([shared]), every, small) == [(product, ["NVIDIA-L4-SHARED"])]
    assert affinity(node_kinds([single]), every, small) == [(product, [single[product]])]
    assert affinity(node_kinds([mixed]), every, small) == [(product, ["NVIDIA-H100-80GB-HBM3"])]
    assert affinity(node_kinds([brand_new]), every, small) == [(product, ["NVIDIA-Brand-New"])]


def test_a_comparison_shows_prices_and_neighbours() -> None:
    """Two plans of different price differ by it, and by their neighbours."""
    first, second = (on(nodes(L4=4), prices={"L4": 0.7}, workload={"concurrency": n}) for n in (1, 8))
    found = {each.field: (each.before, each.after) for each in differences(first.to_dict(), second.to_dict())}

    assert found["price_per_hour"] == (0.7, 1.4)
    assert found["neighbour.1"][0] is None
    assert "1 × L4 holds" in found["neighbour.1"][1]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_nothing_dearer_is_taken_for_less_than_it_is_worth(held: list[float]) -> None:
    """The element taken holds 5 % more than every cheaper one, or is the cheapest; no dearer one that does
    so is left."""
    numbered = list(enumerate(held))
    at, most = most_worth(numbered, lambda pair: pair[1]) or (0, 0.0)

    assert all(most >= value + WORTH - 1e-9 for value in held[:at])
    later = [value for index, value in numbered if index > at]
    assert all(value < max(held[: index + at + 1]) + WORTH for index, value in enumerate(later))
