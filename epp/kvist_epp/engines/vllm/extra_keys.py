"""Extra keys of vLLM's KV events: what makes blocks of equal tokens different. Pure.

Extra keys are what a block's hash covers besides its tokens. In messages they are untagged so far
(``to_event_extra_keys`` in ``v1/core/kv_cache_utils.py``), in this order: the LoRA name, pairs (media id,
offset of its first token from the block's, negative in all blocks but the first), the cache salt (only in the
block that begins at token 0), a digest of prompt embeddings. Inside, the engine uses tagged tuples, which its
authors mean to publish one day: both are understood. Any other key makes a block opaque: a block that is
never matched costs a cache hit, a wrong match would make the index wrong.
"""

from collections.abc import Sequence
from typing import Any

Media = tuple[tuple[int, str], ...]
"""(place of its first token in the event, identifier) of each medium that begins there."""


def read_extra_keys(
    extra_keys: Sequence[Any], lora: str | None, block_size: int, *, at_root: bool, further: int = 0
) -> tuple[str | None, int | None, Media]:
    """Return cache salt, index of the first opaque block, and media; one entry for each block.

    ``further``: tokens behind each block that its hash covers. The places of media are counted without as
    many tokens at the begin of the event, as its tokens are.
    """
    salt: str | None = None
    media: list[tuple[int, str]] = []
    for position, keys in enumerate(extra_keys):
        if not keys:
            continue
        rest, found = _text_keys(keys, lora)
        misplaced = found is not None and not (at_root and position == 0)
        pairs = list(map(_media_pair, rest))
        begins = [pair for pair in pairs if pair is not None and 0 <= pair[1] < block_size + further]
        outside = at_root and position == 0 and any(offset < further for _, offset in begins)
        if misplaced or outside or None in pairs:
            return salt or (None if misplaced else found), position, tuple(media)
        media += [
            (position * block_size + offset - further, identifier)
            for identifier, offset in begins
            if offset >= further
        ]
        salt = salt or found
    return salt, None, tuple(media)


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


def _media_pair(key: Any) -> tuple[str, int] | None:
    """Return (identifier, offset) of a medium; None if the key is anything else."""
    if not isinstance(key, list):
        return None
    pair = key[1:] if len(key) == 3 and key[0] == "mm" else key
    if len(pair) == 2 and type(pair[0]) is str and type(pair[1]) is int:
        return pair[0], pair[1]
    return None


def write_extra_keys(
    blocks: int,
    lora: str | None,
    salt: str | None,
    opaque_from: int | None,
    media: Media = (),
    block_size: int = 1,
) -> list[list[Any] | None] | None:
    """Return extra keys as vLLM publishes them; None if no block has any."""
    if lora is None and salt is None and opaque_from is None and not media:
        return None
    keys: list[list[Any]] = [[] if lora is None else [lora] for _ in range(blocks)]
    for at, identifier in media:
        keys[at // block_size].append([identifier, at % block_size])
    if salt is not None:
        keys[0].append(salt)
    if opaque_from is not None:
        keys[opaque_from].append(b"embeds")
    return [block or None for block in keys]
