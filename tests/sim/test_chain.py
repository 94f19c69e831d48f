"""Block hashes against values computed with vLLM 0.32's own functions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_sim.engine.blocks import Digest, Hasher, cbor, short

VECTORS = {
    "sha256_cbor": (2233398808101521225, 17911472383915781900, 16868077126905186569, 5926136954581141120),
    "sha256": (3262291359910021016, 7142137847444424233, 7027321370956117732, 6707228203778193312),
}


def hashes(
    hasher: Hasher, tokens: list[int], adapter: tuple[str, str] | None = None, salt: str | None = None
) -> list[int]:
    """Published hashes of the full blocks of `tokens`."""
    digests: list[Digest] = []
    hasher.extend(digests, tokens, adapter, salt)
    return [short(digest) for digest in digests]


@pytest.mark.parametrize("algorithm", VECTORS)
def test_hashes_are_vllms(algorithm: str) -> None:
    """Tokens, salt and adapter give the hashes that a real vLLM publishes."""
    hasher = Hasher(16, algorithm)
    first, second, salted, adapted = VECTORS[algorithm]

    assert hashes(hasher, list(range(32))) == [first, second]
    assert hashes(hasher, list(range(16)), salt="s1") == [salted]
    assert hashes(hasher, list(range(16)), adapter=("ad", "/p/ad")) == [adapted]


def test_seed_and_xxhash_change_the_root() -> None:
    """PYTHONHASHSEED moves every hash; xxhash without one differs between processes, as in vLLM."""
    tokens = list(range(16))

    assert hashes(Hasher(16, seed="7"), tokens) == hashes(Hasher(16, seed="7"), tokens)
    assert hashes(Hasher(16, seed="7"), tokens) != hashes(Hasher(16), tokens)
    assert hashes(Hasher(16, "xxhash"), tokens) != hashes(Hasher(16, "xxhash"), tokens)


@given(st.lists(st.integers(0, 200_000), max_size=70), st.integers(0, 70))
def test_extending_in_parts_is_extending_at_once(tokens: list[int], cut: int) -> None:
    """A chain grown token by token in decode has the hashes of one computed from the whole prompt."""
    hasher = Hasher(4)
    digests: list[Digest] = []
    hasher.extend(digests, tokens[:cut], None, "salt")
    hasher.extend(digests, tokens, None, "salt")

    assert [short(digest) for digest in digests] == hashes(hasher, tokens, salt="salt")


def test_cbor_is_shortest_form() -> None:
    """Integers and lengths take the least bytes, as canonical CBOR demands."""
    assert cbor((b"\x01", (23, 24, 255, 256, 65_536, 2**32), None)) == bytes.fromhex(
        "83 41 01 86 17 1818 18ff 190100 1a00010000 1b0000000100000000 f6"
    )
    assert cbor((("cache_salt", "é"),)) == bytes.fromhex("81 82 6a 63616368655f73616c74 62 c3a9")
