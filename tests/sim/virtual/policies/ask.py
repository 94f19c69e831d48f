"""Requests, pods and an index by hand, for the tests of the policies."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from kvist_sim.virtual.policy import BYTES_PER_TOKEN, Context, Overlaps, Pod, Policy, Sample

BLOCK_SIZE = 16


@dataclass(frozen=True, eq=False)
class Asked:
    """A request: `tokens` of prompt, its blocks by hash."""

    number: int = 0
    tokens: int = 0
    blocks: tuple[int, ...] = ()
    session: str = ""
    text: bytes = b""
    max_tokens: int = 100


def asked(blocks: Sequence[int], *, tokens: int | None = None, session: str = "s") -> Asked:
    """Return a prompt of these blocks, with as many tokens as fill them unless given."""
    count = len(blocks) * BLOCK_SIZE if tokens is None else tokens
    text = b"".join(block.to_bytes(8) for block in blocks).ljust(count * BYTES_PER_TOKEN, b".")
    return Asked(0, count, tuple(blocks), session, text)


@dataclass
class Held:
    """An index that knows how many first blocks of anything each pod holds."""

    blocks: Mapping[int, int] = field(default_factory=dict)
    """By number of the pod."""
    below: Mapping[int, dict[str, int]] = field(default_factory=dict)
    """Blocks in slower places, by number of the pod and medium."""

    def match(self, blocks: Sequence[int], pods: Sequence[Pod]) -> list[int]:
        """Never more than the prompt has."""
        return [min(self.blocks.get(pod.number, 0), len(blocks)) for pod in pods]

    def lower(self, blocks: Sequence[int], pods: Sequence[Pod], held: Sequence[int]) -> list[dict[str, int]]:
        """Return nothing: there are no slower places, unless ``below`` says so."""
        return [self.below.get(pod.number, {}) for pod in pods]


def pods(count: int, *samples: Sample) -> list[Pod]:
    """Pods 0, 1, …, the first of them scraped with these samples."""
    made = [Pod(number, f"pod-{number}", 1_000, BLOCK_SIZE) for number in range(count)]
    for pod, sample in zip(made, samples, strict=False):
        pod.sample = sample
    return made


def context(overlaps: Overlaps | None = None, *, seed: int = 1, rate: float = 1_000.0) -> Context:
    """Return the context for a policy; ``rate`` in tokens/s."""
    return Context(
        random=Random(seed),
        overlaps=overlaps or Held(),
        prefill_rate=rate,
        max_num_seqs=256,
        block_size=BLOCK_SIZE,
        after=_never,
    )


def _never(seconds: float, what: Callable[[Any], None], about: Any) -> None:
    raise AssertionError("these policies do nothing by themselves")


def joined(policy: Policy, fleet: Sequence[Pod]) -> None:
    """The beginning of a run."""
    for pod in fleet:
        policy.joined(pod, 0.0)


def send(policy: Policy, request: Asked, fleet: Sequence[Pod], now: float = 0.0) -> int:
    """Choose and route; the number of the pod."""
    at = policy.choose(request, fleet, now)
    assert at is not None, "these policies queue no request"
    pod = fleet[at]
    policy.routed(request, pod, now)
    return pod.number
