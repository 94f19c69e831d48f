"""Tests of the generated text: plausible, repeatable, and canonical unless requested otherwise."""

from itertools import islice

import pytest

from kvist_sim import model
from kvist_sim.engine.tokenizer import Prompts, Writer, output_length

CORPUS = (model.folder() / "corpus.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def prompts() -> Prompts:
    """The package's own model."""
    return Prompts(str(model.folder()))


@pytest.mark.parametrize("seed", ["a", "b", "c"])
@pytest.mark.parametrize("leading_space", [True, False])
def test_generated_tokens_are_canonical(prompts: Prompts, seed: str, leading_space: bool) -> None:
    """The tokens of an answer are those of its text, so that the next turn of the chat hits them."""
    writer = Writer(CORPUS, prompts.encode)
    ids = list(writer.tokens(seed, 500, leading_space=leading_space))
    whole = ids[: -next(back for back in range(1, 20) if prompts.text(ids[-back:]).startswith(" "))]
    text = prompts.text(whole)

    assert prompts.encode(text) == whole
    assert text.startswith(" ") is leading_space
    assert text.split()[1:-1] == [word for word in text.split()[1:-1] if word in CORPUS]


def test_same_seed_same_text(prompts: Prompts) -> None:
    """Replicas with one seed say the same to one prompt; another seed says something else."""
    writer = Writer(CORPUS, prompts.encode)
    first = list(writer.tokens("0/1", 60, leading_space=False))

    assert list(Writer(CORPUS, prompts.encode).tokens("0/1", 60, leading_space=False)) == first
    assert list(writer.tokens("0/2", 60, leading_space=False)) != first
    assert list(islice(writer.tokens("0/1", None, leading_space=False), 60)) == first


def test_noncanonical_tokens_decode_to_the_same_text(prompts: Prompts) -> None:
    """--sim-noncanonical-percent: words are spelled with other tokens; the text's own tokens differ."""
    writer = Writer(CORPUS, prompts.encode, noncanonical=1.0)
    ids = list(writer.tokens("x", 300, leading_space=True))

    assert prompts.text(prompts.encode(prompts.text(ids))) == prompts.text(ids)
    assert prompts.encode(prompts.text(ids)) != ids


def test_length_has_a_floor() -> None:
    """The drawn length never undercuts min_tokens and is the same for the same seed."""
    drawn = [output_length(str(seed), 50.0, 5) for seed in range(2_000)]

    assert min(drawn) >= 5
    assert 40 < sum(drawn) / len(drawn) < 60
    assert output_length("0", 50.0, 5) == drawn[0]


def test_remembered_pieces_change_no_token(prompts: Prompts) -> None:
    """Tokenising between special tokens piece by piece gives what the tokenizer gives for the whole."""
    text = (
        "<|im_start|>system\nBe kind. <|im_end|>\n<|im_start|>user\n Hur mår du?\n\n<|im_end|>\n<|im_start|>"
    )

    assert prompts.text_ids(text) == prompts.encode(text)
    assert prompts.text(prompts.text_ids(text)) == text


def test_stream_holds_half_a_character(prompts: Prompts) -> None:
    """A character spread over several tokens appears with the last of them."""
    stream = prompts.stream()
    ids = prompts.encode("é🧊!")
    said = [stream.feed([token]) for token in ids]

    assert "".join(said) == "é🧊!"
    assert "\ufffd" not in "".join(said)
    assert "" in said
