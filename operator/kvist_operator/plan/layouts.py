"""Possible parallelism: limits set by heads, shards of quantized matrices, experts and accelerators. Pure."""

from dataclasses import replace
from typing import Final

from kvist_operator.errors import SpecError
from kvist_operator.hardware import Accelerator
from kvist_operator.memory.layout import GIB, Layout
from kvist_operator.models.layers import Attention, Recurrent
from kvist_operator.models.shape import ModelShape
from kvist_operator.spec.pool import EngineSpec

from .plan import Choice, Hardware
from .requirements import RULE

MAX_NODES: Final = 4
"""Largest number of pipeline stages; more add too much latency."""
POWERS: Final = (1, 2, 4, 8, 16, 32, 64)


def layouts_within_node(engine: EngineSpec, shape: ModelShape, hardware: Hardware) -> list[Layout]:
    """Return the layouts within a node, the smallest first; none if the user asks for more than a node has.

    Raises:
        SpecError: a parallelism that the model or the node does not allow.
    """
    data = _data_parallel(engine, shape)
    found = [
        _layout(
            shape, hardware.accelerator, tensor, engine.pipeline or 1, data, _context(engine, shape, tensor)
        )
        for tensor in _tensor_parallel(engine, shape, hardware)
    ]
    return [each for each in found if each.gpus <= hardware.per_node and hardware.count in (None, each.gpus)]


def layouts_over_nodes(engine: EngineSpec, shape: ModelShape, hardware: Hardware) -> list[Layout]:
    """Return the layouts over nodes, the fewest nodes first: largest tensor parallelism, a stage per node.

    Raises:
        SpecError: a parallelism that the model or the node does not allow.
    """
    tensors = _tensor_parallel(engine, shape, hardware)
    data = _data_parallel(engine, shape)
    found = [
        _layout(
            shape, hardware.accelerator, tensors[-1], pipeline, data, _context(engine, shape, tensors[-1])
        )
        for pipeline in ([engine.pipeline] if engine.pipeline else range(2, MAX_NODES + 1))
        if tensors and pipeline <= len(shape.layers)
    ]
    return [
        each
        for each in found
        if each.gpus > hardware.per_node and hardware.count in (None, each.gpus) and _even(each, hardware)
    ]


def _layout(
    shape: ModelShape, gpu: Accelerator, tensor: int, pipeline: int, data: int, context: int
) -> Layout:
    """Return a layout whose experts are whole on a rank if there are data-parallel ranks, if the experts are
    large, or if they cannot be split."""
    experts, ranks, expert = shape.experts, tensor * data, False
    if experts and ranks > 1 and not experts.count % ranks:
        expert = data > 1 or _unsplittable(shape, tensor) or routed_bytes(shape) > 2 * gpu.memory_gib * GIB
    return Layout(tensor=tensor, pipeline=pipeline, data=data, context=context, expert=expert)


def _context(engine: EngineSpec, shape: ModelShape, tensor: int) -> int:
    """Return the decode context parallelism that the user asks for; 1 without one. Raises SpecError."""
    context = engine.context or 1
    if engine.tensor or context == 1:
        problem = context_obstacle(shape, tensor, context)
        if problem:
            raise SpecError("spec.engine.decodeContextParallelSize", f"{context} {problem}")
        return context
    # without a tensor parallelism of the user, those that are too small for it are left as they are
    return 1 if context_obstacle(shape, tensor, context) else context


def context_obstacle(shape: ModelShape, tensor: int, context: int) -> str:
    """Return why tensor-parallel ranks cannot divide the tokens of the KV cache; empty if they can.

    vLLM: ``config/model.py: verify_with_parallel_config``, ``v1/kv_cache_interface.py``.
    """
    if context == 1:
        return ""
    if tensor % context:
        return f"does not divide the tensor parallelism of {tensor}"
    kinds = {isinstance(m, Recurrent) or (isinstance(m, Attention) and m.window > 0) for m in shape.mixers}
    if True in kinds:
        return "is not for models with sliding windows or recurrent states: leave it out"
    if shape.latent:
        return ""
    heads, kv_heads = max(shape.heads), max(shape.kv_heads)
    if context > tensor // kv_heads:
        copies = tensor // kv_heads
        return f"is more than the {copies} copies of each KV head that {tensor} ranks hold: leave it out"
    if heads // kv_heads % context:
        return f"does not divide the {heads // kv_heads} query heads of a KV head"
    return ""


def _unsplittable(shape: ModelShape, tensor: int) -> bool:
    """Return whether a shard of an expert would end inside a block of quantized weights."""
    experts, scheme = shape.experts, shape.quantization
    if not experts or not scheme.block or not scheme.covers("experts"):
        return False
    return bool(experts.width % (tensor * scheme.block))


def routed_bytes(shape: ModelShape) -> float:
    """Return the bytes of all routed experts of a model."""
    each = shape.quantization.bytes_of("experts", shape.dtype_bytes)
    routed = (layer.experts for layer in shape.layers if layer.experts)
    return sum(e.count * e.expert_params * each for e in routed)


def _even(layout: Layout, hardware: Hardware) -> bool:
    """Return whether every node gets as many ranks, as vLLM requires, and whole tensor-parallel groups."""
    nodes = hardware.nodes(layout)
    return layout.gpus % nodes == 0 and (layout.gpus // nodes) % layout.tensor == 0


def _tensor_parallel(engine: EngineSpec, shape: ModelShape, hardware: Hardware) -> list[int]:
    """Return the tensor parallelisms that the model and a node allow, the smallest first."""
    allowed = [t for t in POWERS if t <= hardware.per_node and not _tensor_obstacle(shape, t)]
    if engine.tensor is None:
        return allowed
    problem = _tensor_obstacle(shape, engine.tensor)
    remedy = f"use one of {', '.join(map(str, allowed))}"
    if not problem and engine.tensor > hardware.per_node:
        problem = f"is more than the {hardware.per_node} of a node"
        remedy += ", and spec.engine.pipelineParallelSize over nodes"
    if problem:
        raise SpecError("spec.engine.tensorParallelSize", f"{engine.tensor} {problem}: {remedy}")
    return [engine.tensor]


def _tensor_obstacle(shape: ModelShape, tensor: int) -> str:
    """Return why a tensor parallelism is not possible; empty if it is."""
    heads = next((n for n in shape.heads if n % tensor), None)
    if heads:
        return f"does not divide the {heads} heads"
    cached = next((n for n in shape.kv_heads if n % tensor and tensor % n), None)
    if cached:
        return f"neither divides the {cached} KV heads nor is a multiple of them"
    # quantized matrices are split between blocks of scales only
    block = shape.quantization.block
    if block and shape.quantization.covers("mlp"):
        widths = sorted({layer.mlp.width for layer in shape.layers if layer.mlp})
        width = next((w for w in widths if w % (tensor * block)), None)
        if width:
            return f"splits {width} feed-forward columns inside a block of {block} quantized weights"
    return ""


def _data_parallel(engine: EngineSpec, shape: ModelShape) -> int:
    data = engine.data or 1
    if data > 1 and shape.experts is None:
        raise SpecError(
            "spec.engine.dataParallelSize",
            "is for models with experts; for a dense model, increase spec.replicas instead",
        )
    return data


def impossible(engine: EngineSpec, shape: ModelShape, hardware: Hardware) -> SpecError:
    """Return the error for numbers of the user that allow no layout at all, whatever the memory."""
    free = replace(hardware, count=None)
    found = (*layouts_within_node(engine, shape, free), *layouts_over_nodes(engine, shape, free))
    if hardware.count and found:
        sizes = ", ".join(map(str, sorted({layout.gpus for layout in found})))
        remedy = f"use one of {sizes}, or leave it to the plan"
        problem = f"{hardware.count} accelerators cannot share this model evenly: {remedy}"
        return SpecError("spec.accelerator.count", problem)
    if engine.pipeline:
        problem = (
            f"{engine.pipeline} stages of {len(shape.layers)} layers cannot be spread evenly over nodes of "
            f"{hardware.per_node}: leave it to the plan"
        )
        return SpecError("spec.engine.pipelineParallelSize", problem)
    problem = f"nodes of {hardware.per_node} cannot hold {engine.data or 1} copies"
    return SpecError("spec.accelerator.perNode", f"{problem}: lower spec.engine.dataParallelSize")


def describe_layout(layout: Layout, shape: ModelShape, hardware: Hardware, reason: str) -> list[Choice]:
    """Return the choices of a layout; ``reason`` is that of the tensor parallelism."""
    found = [Choice("tensorParallelSize", layout.tensor, reason, RULE)]
    if layout.pipeline > 1:
        nodes, why = hardware.nodes(layout), "as requested"
        if nodes > 1:
            why = f"one stage on each of {nodes} nodes: tensor parallelism stays within a node"
        found.append(Choice("pipelineParallelSize", layout.pipeline, why, RULE))
    if layout.data > 1:
        source = "spec.engine.dataParallelSize"
        found.append(Choice("dataParallelSize", layout.data, "as requested", source))
    if layout.context > 1:
        source = "spec.engine.decodeContextParallelSize"
        found.append(Choice("decodeContextParallelSize", layout.context, "as requested", source))
    experts = shape.experts
    if experts:
        size = f"{routed_bytes(shape) / GIB:.0f} GiB of experts"
        whole = f"{experts.count // layout.expert_size} whole experts per GPU"
        if not layout.expert:
            why = f"{size} are sharded like the other weights: off"
        elif _unsplittable(shape, layout.tensor):
            columns = f"experts of {experts.width} columns"
            why = f"{columns} cannot be split by {layout.tensor} between quantized blocks: {whole}"
        elif layout.data > 1:
            why = f"data-parallel ranks divide the experts: {whole}"
        else:
            why = f"{size} are more than two {hardware.accelerator.name} hold: {whole}"
        found.append(Choice("expertParallel", layout.expert_size, why, RULE))
    return found
