"""Extra keys of vLLM's KV events: what makes blocks of equal tokens different. Pure.

Extra keys are what a block's hash covers besides its tokens. In messages they are untagged so far
(``to_event_extra_keys`` in ``v1/core/kv_cache_utils.py``), in this order: the LoRA name, pairs (media id,
offset), the cache salt (only in the block that begins at token 0), a digest of prompt embeddings. Inside, the
engine uses tagged tuples, which its authors mean to publish one day: both are understood. Any other key makes
a block opaque: a block that is never matched costs a cache hit, a wrong match would make the index wrong.
"""

from collections.abc import Sequence
from typing import Any


def read_extra_keys(
    extra_keys: Sequence[Any], lora: str | None, *, at_root: bool
) -> tuple[str | None, int | None]:
    """Return (cache salt, index of the first block that is not only text); one entry for each block."""
    salt: str | None = None
    for position, keys in enumerate(extra_keys):
        if not keys:
            continue
        rest, found = _text_keys(keys, lora)
        misplaced = found is not None and not (at_root and position == 0)
        if rest or misplaced:
            return salt or (None if misplaced else found), position
        salt = salt or found
    return salt, None


def _text_keys(keys: Any, lora: str | None) -> tuple[list[Any], str | None]:
    """Return the keys of one block without adapter and salt, and the salt."""
    rest = list(keys) if isinstance(keys, list | tuple) else [keys]
    if lora is not None and rest[0] == lora:
        del rest[0]
    rest = [key for key in rest if not _tagged(key, "lora")]
    salts = [key for key in rest if _is_salt(key)]
    if len(salts) != 1:
        return rest, None
    salt = salts[0] if isinstance(salts[0], str) else salts[0][1]
    return [key for key in rest if not _is_salt(key)], salt


def _is_salt(key: Any) -> bool:
    return isinstance(key, str) or _tagged(key, "cache_salt")


def _tagged(key: Any, tag: str) -> bool:
    """Return True for (tag, text, …); in a media pair whose id equals the tag, a number is second."""
    return isinstance(key, list) and len(key) > 1 and key[0] == tag and isinstance(key[1], str)


def write_extra_keys(
    blocks: int, lora: str | None, salt: str | None, opaque_from: int | None
) -> list[list[Any] | None] | None:
    """Return extra keys as vLLM publishes them; None if no block has any."""
    if lora is None and salt is None and opaque_from is None:
        return None
    keys: list[list[Any]] = [[] if lora is None else [lora] for _ in range(blocks)]
    if opaque_from is not None:
        keys[opaque_from].append(["media", 0])
    if salt is not None:
        keys[0].append(salt)
    return [block or None for block in keys]
