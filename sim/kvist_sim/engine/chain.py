"""Block hashes as vLLM computes them: each covers its parent's, its own tokens and its extra keys.

Source: ``vllm/v1/core/kv_cache_utils.py`` and ``vllm/utils/hashing.py``. ``sha256`` is over a pickle,
``sha256_cbor`` over canonical CBOR; both are the same in every replica because the root is a constant
unless PYTHONHASHSEED is set. The two xxhash kinds are stood in for by BLAKE2b, because nothing outside can
tell.
"""

import pickle
import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import blake2b, sha256
from typing import Any, Final, TypeAlias

Digest: TypeAlias = bytes
Keys: TypeAlias = tuple[tuple[str, ...], ...] | None
Hash: TypeAlias = Callable[[Any], Digest]

_SEED: Final = "vllm-none-hash"


def _sha256(value: Any) -> Digest:
    return sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _sha256_cbor(value: Any) -> Digest:
    return sha256(cbor(value)).digest()


def _blake(value: Any) -> Digest:
    return blake2b(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL), digest_size=16).digest()


_ALGORITHMS: Final[dict[str, Hash]] = {
    "sha256": _sha256,
    "sha256_cbor": _sha256_cbor,
    "xxhash": _blake,
    "xxhash_cbor": _blake,
}


def short(digest: Digest) -> int:
    """Return the 64 bits that events carry: the last eight bytes, big-endian
    (``maybe_convert_block_hash``)."""
    return int.from_bytes(digest[-8:], "big")


@lru_cache(maxsize=65_536)
def _head(major: int, value: int) -> bytes:
    """CBOR's type and length, or an unsigned integer (RFC 8949 section 3), in the shortest form."""
    if value < 24:
        return bytes([major << 5 | value])
    size = next(size for size in (1, 2, 4, 8) if value < 1 << 8 * size)
    return bytes([major << 5 | 23 + size.bit_length()]) + value.to_bytes(size, "big")


def cbor(value: Any) -> bytes:
    """Return the canonical CBOR of None, unsigned ints, texts, bytes and (nested) sequences of them."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        text = value.encode()
        return _head(3, len(text)) + text
    if value and isinstance(value[0], int):  # the tokens of a block: the hot case, without a call each
        return _head(4, len(value)) + b"".join([_head(0, token) for token in value])
    return _head(4, len(value)) + b"".join(map(cbor, value))


class Hasher:
    """Hash function of one engine."""

    __slots__ = ("_hash", "block_size", "root")

    def __init__(self, block_size: int, algorithm: str = "sha256", seed: str | None = None) -> None:
        self._hash = _ALGORITHMS[algorithm]
        self.block_size = block_size
        if seed is None:
            seed = secrets.token_hex(16) if algorithm.startswith("xxhash") else _SEED
        self.root = self._hash(seed)

    def extend(
        self, digests: list[Digest], tokens: Sequence[int], adapter: tuple[str, str] | None, salt: str | None
    ) -> None:
        """Append the digests of the full blocks of ``tokens`` that ``digests`` lacks.

        `adapter` is (name, path): both are hashed, only the name is published. The salt counts in the first
        block.
        """
        size = self.block_size
        lora: Keys = None if adapter is None else (("lora", *adapter),)
        parent = digests[-1] if digests else self.root
        for start in range(len(digests) * size, len(tokens) - size + 1, size):
            keys = (*(lora or ()), ("cache_salt", salt)) if salt and start == 0 else lora
            parent = self._hash((parent, tuple(tokens[start : start + size]), keys))
            digests.append(parent)
