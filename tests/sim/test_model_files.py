"""The model files in the package are what the script makes of the corpus."""

from pathlib import Path

import pytest

from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import parse
from kvist_sim import model
from kvist_sim.model import train


def test_files_are_reproducible(tmp_path: Path) -> None:
    """Training again gives the same bytes."""
    train.write(tmp_path)

    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (tmp_path / name).read_bytes() == (model.folder() / name).read_bytes()


def test_the_picker_trusts_them() -> None:
    """The simulator's own vocabulary is byte faithful, so that the demo runs in precise mode."""
    loaded = Model.load(str(model.folder()))

    assert (loaded.faithful, loaded.why_not) == (True, "")
    assert sum(len(piece) == 1 for piece in loaded.pieces) >= 256


CHAT = b"""{"model": "m", "messages": [
  {"role": "system", "content": "Be kind."},
  {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
  {"role": "assistant", "content": null, "tool_calls": [
    {"id": "1", "type": "function", "function": {"name": "f",
      "arguments": "{\\"city\\": \\"Ume\\u00e5\\"}"}}]},
  {"role": "tool", "content": "cold"}], %b}"""


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (b'"stream": true', "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n"),
        (
            b'"tools": [{"type": "function", "function": {"name": "f"}}]',
            "<|im_start|>system\nBe kind.\n\n# Tools\n\nYou may call one or more of these functions:\n",
        ),
    ],
)
def test_template_is_chatml_with_tools(extra: bytes, expected: str) -> None:
    """System prompt, tools, content parts, calls and their answers all have a place."""
    (prompt,) = Model.load(str(model.folder())).prompts(parse("/v1/chat/completions", CHAT % extra))
    text = prompt.decode()

    assert text.startswith(expected)
    assert text.endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"city": "Umeå"}}\n'
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\ncold\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
