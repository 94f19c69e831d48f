"""Promises of ``model``: folders as publishers lay them out, and the prompts of requests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.models import folders, vocabularies
from tokenizers import Tokenizer

from kvist_epp.errors import ModelFilesError
from kvist_epp.prompt.model import Model
from kvist_epp.prompt.request import parse

HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def folder(home: Path, config: dict[str, Any], **files: str) -> Path:
    """A model folder with a small byte-level tokenizer; ``__`` in a file's name stands for a dot."""
    vocabularies.byte_level([]).save(str(home / "tokenizer.json"))
    (home / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        path = home / name.replace("__", ".").replace("--", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return home


def prompts(model: Model, path: str = "/v1/chat/completions", **fields: Any) -> tuple[list[bytes], list[str]]:
    """Return the prompts of a request, and the reasons that were reported."""
    reasons: list[str] = []
    body = {"model": "m", **(fields or {"messages": HI})}
    return model.prompts(parse(path, json.dumps(body).encode()), reasons.append), reasons


@pytest.mark.parametrize("shape", folders.SHAPES)
def test_the_five_shapes_load_and_render(shape: str, tmp_path: Path) -> None:
    """Each is faithful and makes one prompt of a chat."""
    model = Model.load(str(folders.write(shape, tmp_path)))
    made, reasons = prompts(model)
    assert (model.faithful, model.why_not, len(made), b"hi" in made[0], reasons) == (True, "", 1, True, [])


def test_completions_begin_with_what_the_tokenizer_adds(tmp_path: Path) -> None:
    """BOS unless the client says no; several texts and token ids are several prompts."""
    model = Model.load(str(folders.write("llama3", tmp_path)))
    bos = b"<|begin_of_text|>"
    ids = model.encode("two words")
    made = [
        prompts(model, "/v1/completions", prompt=["a", "b"])[0],
        prompts(model, "/v1/completions", prompt="a", add_special_tokens=False)[0],
        prompts(model, "/v1/completions", prompt=[ids, ids[:1]])[0],
    ]
    assert made == [[bos + b"a", bos + b"b"], [b"a"], [b"two words", model.pieces[ids[0]]]]


@pytest.mark.parametrize(
    ("path", "fields", "why"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "system", "content": "s"}]}, "template"),
        ("/v1/chat/completions", {"messages": []}, "empty"),
        ("/v1/chat/completions", {"messages": 5}, "shape"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, "content"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": 1.5}]}, "shape"),
        ("/v1/chat/completions", {"messages": HI, "truncate_prompt_tokens": 1}, "truncation"),
        ("/v1/messages", {"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "shape"),
        ("/v1/completions", {"prompt": [10**9]}, "token-ids"),
        ("/v1/completions", {"prompt": [-1]}, "token-ids"),
        ("/v1/completions", {"prompt": [1, -1, 10**30]}, "token-ids"),
        ("/v1/completions", {"prompt": [10**30]}, "token-ids"),
        ("/inference/v1/generate", {"token_ids": []}, "shape"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/v1/embeddings", {"input": "x"}, "pooling"),
        ("/v1/moderations", {"input": "x"}, "path"),
    ],
)
def test_what_cannot_be_rendered_is_reported(
    tmp_path: Path, path: str, fields: dict[str, Any], why: str
) -> None:
    """No prompt, and one fixed word for a counter."""
    model = Model.load(str(folders.write("gemma", tmp_path)))
    assert prompts(model, path, **fields) == ([], [why])


def test_lone_surrogates_are_routed_by_load(tmp_path: Path) -> None:
    """A prompt with lone surrogates has no bytes and is not rendered, also if the template made them."""
    model = Model.load(str(folder(tmp_path, {"chat_template": "{{ '\\ud800' }}"})))
    assert prompts(model) == ([], ["surrogates"])


NAMED = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({"chat_template": "C"}, {}, [b"C", b"C"]),
        ({"chat_template": NAMED}, {}, [b"D", b"T"]),
        ({"chat_template": "C"}, {"chat_template__jinja": "F"}, [b"F", b"F"]),
        ({"chat_template": NAMED}, {"chat_template__jinja": "F"}, [b"F", b"F"]),
        ({}, {"chat_template__jinja": "F", "additional_chat_templates--tool_use__jinja": "A"}, [b"F", b"A"]),
        ({"chat_template": "C"}, {"chat_template__json": '{"chat_template": "P"}'}, [b"P", b"C"]),
        ({}, {"chat_template__json": '{"chat_template": "P"}'}, [b"P", b"P"]),
    ],
)
def test_the_template_is_the_one_the_engine_takes(
    tmp_path: Path, config: dict[str, Any], files: dict[str, str], expected: list[bytes]
) -> None:
    """Files before the configuration, a processor's for chats without tools, a named one for those with."""
    model = Model.load(str(folder(tmp_path, config, **files)))
    made = [prompts(model)[0], prompts(model, messages=HI, tools=TOOLS)[0]]
    assert made == [[one] for one in expected]


def test_a_model_without_a_template_still_completes(tmp_path: Path) -> None:
    """A chat of such a model is not rendered."""
    model = Model.load(str(folder(tmp_path, {})))
    assert (prompts(model), prompts(model, "/v1/completions", prompt="x")) == (
        ([], ["no-template"]),
        ([b"x"], []),
    )


@pytest.mark.parametrize(
    "files",
    [
        {"config__json": '{"architectures": ["KimiK3ForConditionalGeneration"]}'},
        {"tokenizer__model__v3": "", "consolidated-00001-of-00002__safetensors": ""},
    ],
)
def test_a_template_the_engine_does_not_use_is_not_used(tmp_path: Path, files: dict[str, str]) -> None:
    """Some chats are written by code inside the engine: no template is used for them."""
    model = Model.load(str(folder(tmp_path, {"chat_template": "C"}, **files)))
    assert prompts(model) == ([], ["no-template"])
    assert model.why_no_chats.startswith("its engines write chats in code of their own (")


@pytest.mark.parametrize(
    ("files", "rendered"),
    [
        ({"tekken__json": "{}", "model__safetensors": ""}, b"C"),
        ({"config__json": '{"architectures": ["LlamaForCausalLM", "DeepseekV4ForCausalLM"]}'}, b"C"),
        ({"config__json": '{"architectures": 5, "image_token_id": [], "video_token_id": {}}'}, b"C"),
        ({"config__json": '{"architectures": [["x"]]}'}, b"C"),
        ({"config__json": '{"architectures": {"DeepseekV32ForCausalLM": 1}}'}, b"C"),
        (
            {"config__json": '{"architectures": ["DeepseekV32ForCausalLM"]}'},
            "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜></think>".encode(),
        ),
    ],
)
def test_chats_are_written_as_the_engine_writes_them(
    tmp_path: Path, files: dict[str, str], rendered: bytes
) -> None:
    """Without weights in Mistral's format its tokenizer is not used; DeepSeek's format is known. Odd
    configurations say nothing."""
    model = Model.load(str(folder(tmp_path, {"chat_template": "C"}, **files)))
    assert (prompts(model, messages=HI), model.why_no_chats) == (([rendered], []), "")


ROLES = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
FIRST = "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}"
GUARDED = "{% for m in messages %}" + FIRST + "{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (ROLES, b"system:s;user:hi;system:note;"),
        (GUARDED, b"system:snote;user:hi;"),
        (ROLES + "{% if strftime_now('x') == 'y' %}{% endif %}", b"system:snote;user:hi;"),
        ("{% generation %}{% endgeneration %}" + ROLES, b"system:snote;user:hi;"),
    ],
)
def test_system_messages_are_merged_where_the_engine_merges_them(
    tmp_path: Path, template: str, expected: bytes
) -> None:
    """A chat of the Messages API has one, if its template is taken to refuse more; others stay as sent."""
    model = Model.load(str(folder(tmp_path, {"chat_template": template})))
    messages = [{"role": "user", "content": "hi"}, {"role": "system", "content": "note"}]
    assert prompts(model, "/v1/messages", system="s", messages=messages) == ([expected], [])
    assert prompts(model, messages=messages)[0] in ([b"user:hi;system:note;"], [])


def test_special_tokens_come_from_the_configuration_or_the_older_file(tmp_path: Path) -> None:
    """Special tokens are read as texts or as objects; tokens that the tokenizer lacks are added at its
    end."""
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<new>"}}
    home = folder(tmp_path, config, special_tokens_map__json='{"eos_token": "<old>"}')
    before = Tokenizer.from_file(str(home / "tokenizer.json")).get_vocab_size()
    model = Model.load(str(home))
    assert (prompts(model)[0], model.encode("<new><old>")) == ([b"<new><old>"], [before, before + 1])


def test_tokens_only_the_configuration_knows_are_added_in_order(tmp_path: Path) -> None:
    """By their ids, as the engine's tokenizer does."""
    described = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    added = {"2001": {"content": "<b>", **described}, "2000": {"content": "<a>", **described}}
    home = folder(tmp_path, {"added_tokens_decoder": added})
    before = Tokenizer.from_file(str(home / "tokenizer.json")).get_vocab_size()
    assert Model.load(str(home)).encode("<b><a>") == [before + 1, before]


def without_tokenizer(home: Path) -> None:
    """Delete the file tokenizer.json."""
    (home / "tokenizer.json").unlink()


def broken_tokenizer(home: Path) -> None:
    """A tokenizer.json that is none."""
    (home / "tokenizer.json").write_text("{}")


def broken_config(home: Path) -> None:
    """A tokenizer_config.json that is no JSON."""
    (home / "tokenizer_config.json").write_text("{")


def listed_config(home: Path) -> None:
    """A tokenizer_config.json that is a list."""
    (home / "tokenizer_config.json").write_text("[]")


def broken_template(home: Path) -> None:
    """A chat template that does not compile."""
    (home / "chat_template.jinja").write_text("{% for %}")


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (without_tokenizer, "tokenizer.json"),
        (broken_tokenizer, "tokenizer.json"),
        (broken_config, "tokenizer_config.json"),
        (listed_config, "tokenizer_config.json"),
        (broken_template, "chat template"),
    ],
)
def test_files_that_cannot_be_used_are_named(
    tmp_path: Path, spoil: Callable[[Path], None], named: str
) -> None:
    """With the remedy, at load."""
    spoil(folder(tmp_path, {}))
    with pytest.raises(ModelFilesError, match=named):
        Model.load(str(tmp_path))


def test_a_folder_that_is_absent_is_named() -> None:
    """The error for an absent folder names both forms of a source."""
    with pytest.raises(ModelFilesError, match=r"no folder .*absent.*hf://"):
        Model.load("/absent")
