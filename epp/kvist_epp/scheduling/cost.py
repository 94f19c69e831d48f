"""What sending a request to a pod costs, in seconds, for comparing pods. Pure.

::

    wait(pod) = prefill tokens it still owes / its prefill rate
                + time until a sequence slot is free when its batch is full
    work(pod) = uncached tokens / its prefill rate + time to load blocks from a slower tier;
                what somebody else holds counts once for all who will use the copy
    cost      = wait + price x tightness x work + room + a little per running sequence
                + a little for the share of the prompt that somebody else holds
    price     = 1, the request's own time, and more the more sequences run in the pool: each of them waits
                while a prompt is computed; and with the share of its pods whose KV cache is full
    tightness = what is clearly less than the pool's mean share of the time that sequences leave for prompts,
                over the pod's: a second of prefill takes so much longer there; else 1
    room      = what the prompt's new blocks evict, at the pool's mean prefill rate
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Protocol


@dataclass(frozen=True, slots=True)
class Policy:
    """Every constant of the policy. Figures refer to ``facts/measured.md``, policies in virtual time."""

    evicted: float = 3.0
    """How often a token is computed again, in the mean, whose block had to make room for a new one. At the
    pool's mean rate, since other requests will compute it somewhere: not dearer on a slow GPU. 1 lost goodput
    on agents, groups and documents; 7 on uneven GPUs, and where one prefix is hot
    (``docs/decisions/0015``)."""
    price_running: float = 0.08
    """Added to the price per sequence on a pod, in the pool's mean (1/sequence). A second of prefill delays
    each of them by a second once, over hundreds of tokens. So a busy pool hardly copies and an idle one does.
    0.15 lost goodput on system prompts and on uneven GPUs. The pod's own number instead of the mean parts the
    pool in pods that only prefill and pods that only decode."""
    price_crowded: float = 30.0
    """Added where every pod's KV cache is full and lets requests wait, in proportion where some are: there a
    copy takes the room of several requests that share the original. Without it groups at capacity lost 11
    points of goodput; 10 gave back half of that."""
    running_seconds: float = 0.005
    """Per sequence on the pod: each slows every decode step. Without it, pods with cheap work collect
    sequences until their cache is full of them; 0.02 outweighs what waits there."""
    copy_seconds: float = 0.050
    """For a whole prompt recomputed although a pod holds it: a copy takes cache, and less than this is not
    felt. Without it, requests of a few hundred tokens left their pod because three had ended there that the
    access log had not told of yet (``docs/decisions/0003``)."""
    near_seconds: float = 0.001
    """Costs this close are a tie: 16 tokens of prefill, less than a step's jitter."""
    held_share: float = 0.1
    """Of the new tokens that wait in the picker for a pod, those counted as before a newcomer: the newest
    goes first. With all of them counted, prompts left their pod for one that had to copy them."""
    closed_seconds: float = 0.2
    """Until a pod that may not take up a prompt now will: 0 and 0.8 lost goodput on uneven GPUs, where small
    ones' KV caches stay full."""
    tight: float = 0.8
    """A pod is tight whose sequences leave less than this part of the mean's time for prompts
    (``fleet.pacing``). With 0, small GPUs among large ones got what they could not take up, and requests
    waited there for a minute; 1 makes something of every difference between equal ones
    (``docs/decisions/0018``)."""
    decode_seconds: float = 5.0
    """Time from first to last token until a pod's own mean is learned: 250 tokens of 20 ms."""
    load_rates: Mapping[str, float] = field(
        default_factory=lambda: MappingProxyType({"CPU": 80_000.0, "STORAGE": 12_000.0}), hash=False
    )
    """Tokens/s loaded from a slower tier, by medium: 256 KiB a token (Qwen3-32B) over PCIe at 20 GB/s and
    from a disk at 3 GB/s."""
    other_load_rate: float = 12_000.0
    """For a medium not named above."""


DEFAULT: Final = Policy()
AMONG_PEERS: Final = replace(DEFAULT, near_seconds=0.05)
"""Where other replicas route to the same pods: what they routed within a gossip interval (0.1 s) is not known
yet, a few prompts of a twentieth of a second each. All of them would follow smaller differences to the same
pod."""
PACED_AMONG_PEERS: Final = replace(DEFAULT, near_seconds=0.01)
"""The same where prompts wait for pods (``fleet.pacing``): following costs a wait, no queue in an engine."""


def policy_among(peers: int, *, paced: bool) -> Policy:
    """Where so many other replicas route to the same pods, and prompts are ``paced`` or not."""
    if not peers:
        return DEFAULT
    return PACED_AMONG_PEERS if paced else AMONG_PEERS


class Hit(Protocol):
    """What the index knows of this prompt on one pod: ``index.byte_index.Hit``, or ``Approximate``."""

    @property
    def tokens(self) -> int:
        """Cached tokens, from the start of the prompt."""

    @property
    def bytes(self) -> int:
        """Their text."""

    @property
    def lower(self) -> Mapping[str, int]:
        """Further tokens that a slower medium holds."""


NOTHING_LOWER: Final[Mapping[str, int]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Match:
    """A hit by hand."""

    tokens: int = 0
    bytes: int = 0
    lower: Mapping[str, int] = field(default_factory=lambda: NOTHING_LOWER, hash=False)


NO_MATCH: Final = Match()


def slot_seconds(running: int, slots: int | None, decode_seconds: float) -> float:
    """Seconds until a sequence slot is free for one more request on a pod with ``running``.

    A full batch of ``slots`` sequences that decode ``decode_seconds`` each frees a slot every
    ``decode_seconds / slots``; those already waiting for one go first. 0 while there is room or slots are
    unknown.
    """
    if slots is None or running < slots:
        return 0.0
    return (running - slots + 1) * decode_seconds / slots


def work_seconds(
    uncached: int, rate: float, lower: Mapping[str, int] = NOTHING_LOWER, policy: Policy = DEFAULT
) -> float:
    """Seconds of prefill, and of loading what a slower tier holds where that is quicker than computing it."""
    left, loading = uncached, 0.0
    for medium, held in lower.items():
        tokens = min(held, left)
        load_rate = policy.load_rates.get(medium, policy.other_load_rate)
        if load_rate > rate:
            left -= tokens
            loading += tokens / load_rate
    return left / rate + loading


def price(running: float, crowded: float = 0.0, policy: Policy = DEFAULT) -> float:
    """Price of a second of work in a pool whose pods run so many sequences in the mean, and of which this
    share has a full KV cache."""
    return 1.0 + policy.price_running * running + policy.price_crowded * crowded


def room_seconds(uncached: float, mean_rate: float, policy: Policy = DEFAULT) -> float:
    """What others will have to compute again because so many tokens took the room of theirs."""
    return policy.evicted * uncached / mean_rate


def copy_share(uses: float, copies: int) -> float:
    """The part of a copy's work that this request answers for: ``uses`` of the same beginning came in the
    last moments, and will come in the next ones; the new copy gets its share of them beside ``copies``.

    The power parts the two kinds: what has several uses for each copy is copied freely, what has less than
    one hardly more often than if it had none. With the square a few pods never got a prefix that all others
    had (``docs/decisions/0015``).
    """
    return 1.0 / (1.0 + (uses / (copies + 1)) ** 3)


def cost(wait: float, work: float, running: int, price: float, policy: Policy = DEFAULT) -> float:
    """Seconds, for comparing pods only; ``wait + work`` is the predicted time to the first token."""
    return wait + price * work + policy.running_seconds * running
