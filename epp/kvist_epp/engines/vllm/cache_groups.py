"""Kinds of vLLM's KV cache groups, and what each needs for a hit.

Source: ``KVCacheSpecKind`` in ``vllm/v1/kv_cache_interface.py``; ``_contiguous_blocks_for_hit`` and
``MambaManager`` in ``vllm/v1/core/single_type_kv_cache_manager.py`` (0.33).
"""

FULL_KINDS = frozenset({None, "full_attention", "mla_attention", "sink_full_attention", "unknown"})
"""Kinds whose blocks keep a whole prefix; None: the engine does not say."""
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
STATE_KIND = "mamba"


def window_blocks(kind: str | None, window: int | None, block_size: int) -> int | None:
    """Return how many blocks in a row before the end of a hit a group needs; None: that is not known.

    ``window`` and ``block_size`` are in tokens. A token attends to itself and the ``window - 1`` before it; a
    state needs that of the last block.
    """
    if kind == STATE_KIND:
        return 1
    if kind not in WINDOW_KINDS or window is None or block_size < 1:
        return None
    return -(-(window - 1) // block_size)
