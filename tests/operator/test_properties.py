"""Properties of every plan, for any model and hardware."""

import argparse
import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from tests.operator.pools import known, pool

from kvist_operator.engine_flags import EngineArgs
from kvist_operator.engine_version import engine_version
from kvist_operator.errors import SpecError
from kvist_operator.extra_args import read_extra
from kvist_operator.hardware import ROWS, known_accelerator
from kvist_operator.memory.layout import GIB, EngineSettings, Layout
from kvist_operator.memory.memory_budget import Memory, budget
from kvist_operator.models.catalogue import catalogue
from kvist_operator.plan import Plan, PlanVerdict, make_plan

NAMES = sorted(catalogue())
models = st.sampled_from(NAMES)
gpus = st.sampled_from([row.name for row in ROWS if row.vendor in ("nvidia", "amd")])
layouts = st.builds(
    Layout, tensor=st.sampled_from([1, 2, 4, 8]), pipeline=st.integers(1, 3), expert=st.booleans()
)
kv_dtypes = st.sampled_from(["auto", "fp8"])


def planned(name: str, gpu: str, memory: float | None = None) -> Plan:
    """Return the plan for a model on a GPU with this many GiB."""
    spec = {} if memory is None else {"accelerator": {"memory": f"{int(memory * 1024)}Mi"}}
    try:
        return make_plan(pool(f"hf://{name}", **spec), known(name), gpu=gpu)
    except SpecError:  # a GPU that is older than the kernels for this checkpoint
        reject()


def measured(name: str, gpu: str, layout: Layout, **run: Any) -> Memory:
    """Return the memory of one layout."""
    return budget(known(name), known_accelerator(gpu), layout, EngineSettings(**run))


@settings(max_examples=120, deadline=None)
@given(models, gpus)
def test_every_model_gets_a_sound_plan_or_a_refusal_with_a_number(name: str, gpu: str) -> None:
    """A plan that fits holds a request, a refused one lacks memory, and parallelism divides the heads."""
    found = planned(name, gpu)
    shape = known(name).shape

    if found.verdict is PlanVerdict.REFUSED:
        assert found.shortfall_bytes > 0
        assert found.nearest
    else:
        assert found.memory.max_concurrency >= 1
        assert found.settings.max_len >= min(8192, shape.max_len)
        assert found.settings.batched_tokens >= found.settings.sequences
        assert found.argv[:2] == ("serve", name)
    assert all(heads % found.layout.tensor == 0 for heads in shape.heads)


@settings(max_examples=60, deadline=None)
@given(
    models,
    gpus,
    st.none() | st.integers(60, 96),
    st.none() | st.sampled_from([2048, 8192]),
    st.none() | st.sampled_from([16, 512]),
    st.none() | st.sampled_from([4096, 16_384]),
    st.none() | st.sampled_from([1, 2, 4, 8]),
)
def test_values_of_the_user_never_change(
    name: str,
    gpu: str,
    share: int | None,
    tokens: int | None,
    sequences: int | None,
    length: int | None,
    count: int | None,
) -> None:
    """Whatever gives way for the KV cache, a value that the pool sets is the one that runs."""
    engine = {
        "gpuMemoryUtilizationPercent": share,
        "maxNumBatchedTokens": tokens,
        "maxNumSeqs": sequences,
        "maxModelLen": length,
    }
    given_values = {key: value for key, value in engine.items() if value is not None}
    accelerator = {"count": count} if count else {}
    try:
        resource = pool(f"hf://{name}", engine=given_values, accelerator=accelerator)
        found = make_plan(resource, known(name), gpu=gpu)
    except SpecError:  # values that do not go together
        reject()
    s = found.settings
    runs = (s.share, s.batched_tokens, s.sequences, s.max_len)

    assert all(value in (None, run) for value, run in zip(engine.values(), runs, strict=True))
    assert found.layout.gpus == (count or found.layout.gpus)


@settings(max_examples=60, deadline=None)
@given(models, gpus)
def test_totals_add_up(name: str, gpu: str) -> None:
    """The items add up to the usable share, and tokens are the cache's bytes by the bytes per token."""
    found = planned(name, gpu)
    m = found.memory

    assert (
        m.weights + m.activations + m.encoder + m.graphs + m.overhead + m.kv == m.usable
        or abs(m.weights + m.activations + m.encoder + m.graphs + m.overhead + m.kv - m.usable) < 1
    )
    if found.verdict is not PlanVerdict.REFUSED and m.caches:
        assert m.kv_tokens <= found.layout.data * m.kv / m.bytes_per_token * 1.001


@settings(max_examples=60, deadline=None)
@given(models, st.floats(20, 180), st.floats(1, 60))
def test_more_memory_never_gives_less_context(name: str, memory: float, more: float) -> None:
    """More memory per GPU never turns a plan into a refusal, or shortens its context on as many GPUs."""
    small, large = (_on(name, gib) for gib in (memory, memory + more))

    if small.verdict is not PlanVerdict.REFUSED:
        assert large.verdict is not PlanVerdict.REFUSED
        fewer = large.layout.gpus < small.layout.gpus
        assert fewer or large.settings.max_len >= small.settings.max_len


def _on(name: str, gib: float) -> Plan:
    card = {"product": "card", "memory": f"{int(gib * 1024)}Mi", "perNode": 8}
    return make_plan(pool(f"hf://{name}", accelerator=card), known(name))


@settings(max_examples=60, deadline=None)
@given(models, layouts, kv_dtypes, st.floats(0.1, 200), st.floats(0.1, 200))
def test_more_cache_never_holds_fewer_tokens(
    name: str, layout: Layout, dtype: str, first: float, second: float
) -> None:
    """A larger cache holds at least as many tokens, for every layer type and layout."""
    stages = measured(name, "H100", layout, kv_dtype=dtype).stages
    low, high = sorted((first * GIB, second * GIB))

    assert all(c.tokens(low, 16_384) <= c.tokens(high, 16_384) for c in stages)


@settings(max_examples=60, deadline=None)
@given(models, layouts, st.integers(1, 131_072), st.integers(1, 131_072))
def test_longer_requests_never_take_less(name: str, layout: Layout, first: int, second: int) -> None:
    """A longer request takes at least as many blocks, windows and states included."""
    low, high = sorted((first, second))

    assert all(c.request_bytes(low) <= c.request_bytes(high) for c in measured(name, "H100", layout).stages)


@settings(max_examples=60, deadline=None)
@given(models, st.sampled_from([1, 2, 4]))
def test_more_ranks_never_hold_more_weights(name: str, tensor: int) -> None:
    """Twice the tensor parallelism at most halves a GPU's weights, and never increases them."""
    one, two = (measured(name, "H100", Layout(tensor=t)).weights for t in (tensor, 2 * tensor))

    assert one / 2 - 1 <= two < one


@settings(max_examples=60, deadline=None)
@given(models)
def test_fp8_never_takes_more_than_16_bits(name: str) -> None:
    """An FP8 cache has at most the bytes per token of a 16-bit one, for any layers."""
    wide, narrow = (measured(name, "H100", Layout(), kv_dtype=d).bytes_per_token for d in ("auto", "fp8"))

    assert narrow <= wide


words = st.text("abcdefgh-", min_size=1, max_size=12).filter(lambda s: not s.startswith("-"))
objects = st.dictionaries(words, st.integers() | words, max_size=3)
arguments = st.builds(
    EngineArgs,
    model=words,
    served_model_name=st.none() | words,
    tensor_parallel_size=st.none() | st.integers(1, 64),
    enable_expert_parallel=st.booleans(),
    gpu_memory_utilization=st.none() | st.integers(1, 99).map(lambda n: n / 100),
    kv_cache_dtype=st.none() | words,
    enable_prefix_caching=st.none() | st.booleans(),
    kv_events_config=st.none() | objects,
    hf_overrides=st.none() | objects,
    lora_modules=st.none() | st.lists(words, min_size=1, max_size=3).map(tuple),
    shutdown_timeout=st.none() | st.integers(0, 600),
    extra=st.lists(words, max_size=3).map(lambda e: ("--seed", *e) if e else ()),
)


READERS: dict[str, type] = {"int": int, "float": float, "str": str}


@given(arguments)
def test_arguments_survive_the_command_line(args: EngineArgs) -> None:
    """A parser with an option for each field reads the same arguments again."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("serve")
    parser.add_argument("model")
    for field in dataclasses.fields(EngineArgs)[1:-1]:
        kind, flag = str(field.type), f"--{field.name.replace('_', '-')}"
        if kind.startswith("bool |"):
            parser.add_argument(flag, action=argparse.BooleanOptionalAction)
        elif kind.startswith("bool") or field.type is bool:
            parser.add_argument(flag, action="store_true")
        elif kind.startswith("tuple"):
            parser.add_argument(flag, nargs="*")
        else:
            parser.add_argument(flag, type=READERS.get(kind.partition(" ")[0].partition("[")[0], json.loads))
    found, extra = parser.parse_known_args(args.to_argv())
    values: dict[str, Any] = {
        key: tuple(v) if isinstance(v, list) else v for key, v in vars(found).items() if key != "serve"
    }

    assert EngineArgs(**values, extra=tuple(extra)) == args


@given(
    st.sampled_from(["kv-cache-dtype", "gpu-memory-utilization", "max-model-len", "served-model-name"]),
    st.data(),
)
def test_no_spelling_of_an_owned_flag_gets_through(flag: str, data: st.DataObject) -> None:
    """A flag of the plan is refused in every spelling that vLLM's parser accepts."""
    cut = data.draw(st.integers(5, len(flag)))
    spelled = "--" + "".join(data.draw(st.sampled_from("-_")) if c == "-" else c for c in flag[:cut])
    tail = data.draw(st.sampled_from(["", "=x", ".key"]))

    with pytest.raises(SpecError, match=r"^spec\.engine\.extraArgs\[0\]: "):
        read_extra([spelled + tail], engine_version("vllm/vllm-openai:v0.33.0"))
