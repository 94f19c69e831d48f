"""Which parallelisms are possible: what divides heads, shards, experts and accelerators. Pure."""

from dataclasses import replace
from typing import Final

from kvist_operator.errors import SpecError
from kvist_operator.hardware import Accelerator
from kvist_operator.memory.layout import GIB, Layout
from kvist_operator.models.layers import Experts
from kvist_operator.models.shape import ModelShape
from kvist_operator.spec.pool import EngineSpec

from .plan import Choice, Hardware

MOST_NODES: Final = 4
"""Pipeline stages beyond this cost more latency than anybody plans for."""
POWERS: Final = (1, 2, 4, 8, 16, 32, 64)


def one_node(engine: EngineSpec, shape: ModelShape, hardware: Hardware) -> list[Layout]:
    """Layouts within a node, the smallest first; none where the user asks for more than a node has.

    Raises:
        SpecError: a parallelism that cannot be.
    """
    data, pipeline = _data(engine, shape), engine.pipeline or 1
    found = [
        Layout(
            tensor=t,
            pipeline=pipeline,
            data=data,
            expert=expert_parallel(shape, hardware.accelerator, t, data),
        )
        for t in tensors(engine, shape, hardware)
    ]
    return [layout for layout in found if layout.gpus <= hardware.per_node and _counted(layout, hardware)]


def more_nodes(engine: EngineSpec, shape: ModelShape, hardware: Hardware) -> list[Layout]:
    """Layouts over nodes: the largest tensor parallelism, one pipeline stage per node, fewest nodes first."""
    widest = tensors(engine, shape, hardware)[-1:]
    data = _data(engine, shape)
    stages = [engine.pipeline] if engine.pipeline else range(2, MOST_NODES + 1)
    found = [
        Layout(tensor=t, pipeline=p, data=data, expert=expert_parallel(shape, hardware.accelerator, t, data))
        for t in widest
        for p in stages
        if p <= len(shape.layers)
    ]
    return [
        each
        for each in found
        if each.gpus > hardware.per_node and _counted(each, hardware) and _even(each, hardware)
    ]


def impossible(engine: EngineSpec, shape: ModelShape, hardware: Hardware) -> SpecError:
    """Why there is no layout at all, whatever the memory: the user's numbers do not go together."""
    free = replace(hardware, count=None)
    sizes = {layout.gpus for layout in (*one_node(engine, shape, free), *more_nodes(engine, shape, free))}
    if hardware.count and sizes:
        return SpecError(
            "spec.accelerator.count",
            f"this model cannot use {hardware.count} accelerators evenly: {_instead(sorted(sizes))}, or "
            "leave it to the plan",
        )
    if engine.pipeline:
        problem = f"{engine.pipeline} stages of {len(shape.layers)} layers cannot be spread evenly over nodes"
        return SpecError(
            "spec.engine.pipelineParallelSize", f"{problem} of {hardware.per_node}: leave it to the plan"
        )
    return SpecError(
        "spec.accelerator.perNode",
        f"a node of {hardware.per_node} cannot hold {engine.data or 1} copies: lower "
        "spec.engine.dataParallelSize",
    )


def _even(layout: Layout, hardware: Hardware) -> bool:
    """vLLM gives every node as many ranks, and tensor parallelism must not span two of them."""
    nodes = -(-layout.gpus // hardware.per_node)
    return layout.gpus % nodes == 0 and (layout.gpus // nodes) % layout.tensor == 0


def _counted(layout: Layout, hardware: Hardware) -> bool:
    return hardware.count is None or layout.gpus == hardware.count


def tensors(engine: EngineSpec, shape: ModelShape, hardware: Hardware) -> list[int]:
    """Tensor parallelisms that the model allows and a node has room for, the smallest first."""
    allowed = [t for t in POWERS if t <= hardware.per_node and not tensor_obstacle(shape, t)]
    if engine.tensor is None:
        return allowed
    obstacle = tensor_obstacle(shape, engine.tensor)
    if obstacle:
        raise SpecError("spec.engine.tensorParallelSize", f"{engine.tensor} {obstacle}: {_instead(allowed)}")
    if engine.tensor > hardware.per_node:
        raise SpecError(
            "spec.engine.tensorParallelSize",
            f"{engine.tensor} is more than the {hardware.per_node} of a node: {_instead(allowed)}, and "
            "spec.engine.pipelineParallelSize over nodes",
        )
    return [engine.tensor]


def _instead(numbers: list[int]) -> str:
    return f"use one of {', '.join(map(str, numbers))}"


def tensor_obstacle(shape: ModelShape, tensor: int) -> str:
    """Why a tensor parallelism cannot be; empty when it can."""
    heads = next((n for n in shape.heads if n % tensor), None)
    if heads:
        return f"does not divide the {heads} heads"
    cached = next((n for n in shape.kv_heads if n % tensor and tensor % n), None)
    if cached:
        return f"neither divides the {cached} KV heads nor is a multiple of them"
    return _shard_obstacle(shape, tensor)


def _shard_obstacle(shape: ModelShape, tensor: int) -> str:
    """Quantised matrices are cut between blocks of scales only."""
    block = shape.quantization.block
    if not block or not shape.quantization.covers("mlp"):
        return ""
    widths = {layer.mlp.width for layer in shape.layers if layer.mlp}
    width = next((w for w in sorted(widths) if w % (tensor * block)), None)
    return (
        f"cuts the {width} columns of the feed-forward inside a block of {block} quantised weights"
        if width
        else ""
    )


def _data(engine: EngineSpec, shape: ModelShape) -> int:
    data = engine.data or 1
    if data > 1 and shape.experts is None:
        raise SpecError(
            "spec.engine.dataParallelSize",
            "is for models with experts; a dense model is served by more spec.replicas",
        )
    return data


def expert_parallel(shape: ModelShape, gpu: Accelerator, tensor: int, data: int) -> bool:
    """Whether experts are spread whole: over data-parallel ranks, when many, or when they cannot be cut."""
    experts, ranks = shape.experts, tensor * data
    if experts is None or ranks == 1 or experts.count % ranks:
        return False
    return data > 1 or _uncuttable(shape, experts, tensor) or _large(shape, gpu)


def _uncuttable(shape: ModelShape, experts: Experts, tensor: int) -> bool:
    scheme = shape.quantization
    return bool(scheme.block and scheme.covers("experts") and experts.width % (tensor * scheme.block))


def routed_bytes(shape: ModelShape) -> float:
    """Bytes of all routed experts."""
    each = shape.quantization.bytes_of("experts", shape.dtype_bytes)
    routed = (layer.experts for layer in shape.layers if layer.experts)
    return sum(e.count * e.expert_params * each for e in routed)


def _large(shape: ModelShape, gpu: Accelerator) -> bool:
    return routed_bytes(shape) > 2 * gpu.memory_gib * GIB


def describe(layout: Layout, shape: ModelShape, hardware: Hardware, why: str) -> list[Choice]:
    """The choices that a layout stands for."""
    source = "rule of size"
    nodes = -(-layout.gpus // hardware.per_node)
    found = [Choice("tensorParallelSize", layout.tensor, why, source)]
    if layout.pipeline > 1:
        reason = (
            f"one stage on each of {nodes} nodes: tensor parallelism stays within a node"
            if nodes > 1
            else "as asked"
        )
        found.append(Choice("pipelineParallelSize", layout.pipeline, reason, source))
    if layout.data > 1:
        found.append(Choice("dataParallelSize", layout.data, "as asked", "spec.engine.dataParallelSize"))
    if shape.experts:
        found.append(
            Choice("expertParallel", layout.expert_size, _expert_reason(layout, shape, hardware), source)
        )
    return found


def _expert_reason(layout: Layout, shape: ModelShape, hardware: Hardware) -> str:
    experts = shape.experts
    size = f"{routed_bytes(shape) / GIB:.0f} GiB of experts"
    if not layout.expert:
        return f"{size} are split like the rest: off"
    each = experts.count // layout.expert_size if experts else 0
    if experts and _uncuttable(shape, experts, layout.tensor):
        uncut = (
            f"experts of {experts.width} columns cannot be cut by {layout.tensor} between quantised blocks"
        )
        return f"{uncut}: {each} whole ones a GPU"
    return f"{size} are more than two {hardware.accelerator.name} hold: {each} whole ones a GPU"
