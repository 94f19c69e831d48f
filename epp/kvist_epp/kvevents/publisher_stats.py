"""What is counted about each publisher. Metrics read it; nothing decides by it."""

from dataclasses import dataclass


@dataclass(slots=True)
class PublisherStats:
    """Counters of one publisher (pod, rank); all only grow, but for the last four."""

    messages: int = 0
    garbage: int = 0
    """Messages that are no batch of events."""
    stored: int = 0
    """BlockStored events."""
    removed: int = 0
    """BlockRemoved events."""
    cleared: int = 0
    """AllBlocksCleared events."""
    unknown: int = 0
    """Events of types we do not know."""
    malformed: int = 0
    """Events of known types that could not be read."""
    blocks: int = 0
    """Blocks announced as stored in the groups and tiers that are indexed."""
    gaps: int = 0
    resets: int = 0
    """Times everything the publisher had said was forgotten, restarts included."""
    restarts: int = 0
    replays: int = 0
    replay_failures: int = 0
    other_groups: int = 0
    """Events of KV cache groups that are not indexed (sliding window, mamba, a second group)."""
    missized: int = 0
    """Events whose token ids do not fill their blocks."""
    opaque_blocks: int = 0
    """Blocks that can never match: media, prompt embeddings, token ids the model's files do not have."""
    unknown_ids: int = 0
    """Events with token ids the model's files do not have."""
    orphans: int = 0
    """Events with an unknown parent that waited."""
    orphans_dropped: int = 0
    """Those that waited in vain."""
    credited: int = 0
    """Blocks born in decode that proved canonical."""
    uncredited: int = 0
    """Blocks born in decode that did not, or could not be checked."""
    revoked: int = 0
    """Credited blocks whose credit the text that followed took back."""
    held_unknown: int = 0
    """Blocks of offload tiers announced by a hash nobody knows."""
    warm: bool = False
    """The first replay is over, or cannot be had."""
    suspect: bool = False
    """Messages are missing and not yet explained."""
    held: int = 0
    """Live messages that wait for a replay."""
    heard_at: float | None = None
    """Monotonic seconds of the last message; None: the publisher was never heard."""
