"""Embedding, rerank and classification models: how they are recognised, and what their plans promise."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.operator.manifested import one, rendered
from tests.operator.pools import DENSE, known, made, plan, pool
from tests.operator.test_status import NOW, WELL, conditions, subject

from kvist_epp.settings.settings import Settings
from kvist_operator.errors import SpecError
from kvist_operator.hardware import ROWS
from kvist_operator.models.catalogue import catalogue
from kvist_operator.models.pooling import SentenceFiles, read_sentence_files
from kvist_operator.models.shape import (
    Facts,
    ModelFiles,
    ModelShape,
    checkpoint_bytes,
    parameters,
    read_shape,
)
from kvist_operator.models.source import ModelHub, from_folder, from_hub, from_model_files
from kvist_operator.plan import PlanVerdict, make_plan
from kvist_operator.spec.pool import Task
from kvist_operator.status import status
from kvist_operator.status.known_model import known_model, model_status

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
"""BAAI/bge-large-en-v1.5."""
POOLING_MODULE = [
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
]
ENCODERS = sorted(
    name
    for name, entry in catalogue().items()
    if (found := known(name).shape.pooling) is not None and not found.causal
)


def shape(sentence: SentenceFiles | None = None, **config: Any) -> ModelShape:
    """Return the shape of a model like bge-large, with other keys."""
    return read_shape({**BERT, **config}, sentence=sentence)


def flags(argv: tuple[str, ...]) -> set[str]:
    """Return the flags of a command line."""
    return {word for word in argv if word.startswith("--")}


@pytest.mark.parametrize(
    ("architecture", "task", "causal", "method"),
    [
        ("BertModel", Task.EMBED, False, "CLS"),
        ("XLMRobertaModel", Task.EMBED, False, "CLS"),
        ("ModernBertModel", Task.EMBED, False, "CLS"),
        ("NomicBertModel", Task.EMBED, False, "CLS"),
        ("GteNewModel", Task.EMBED, False, "CLS"),
        ("LlamaBidirectionalModel", Task.EMBED, False, "CLS"),
        ("Qwen2Model", Task.EMBED, True, "LAST"),
        ("MistralModel", Task.EMBED, True, "LAST"),
        ("BertForSequenceClassification", Task.CLASSIFY, False, "CLS"),
        ("Qwen3ForSequenceClassification", Task.CLASSIFY, True, "LAST"),
        ("BertForTokenClassification", Task.CLASSIFY, False, "ALL"),
        ("Qwen2ForRewardModel", Task.CLASSIFY, True, "ALL"),
        ("Qwen2ForProcessRewardModel", Task.CLASSIFY, True, "STEP"),
    ],
)
def test_architectures_say_what_a_model_does(
    architecture: str, task: Task, causal: bool, method: str
) -> None:
    """Task, attention and pooling follow vLLM's registry and its table of suffixes."""
    found = shape(architectures=[architecture]).pooling

    assert found is not None
    assert (found.task, found.causal, found.method) == (task, causal, method)


@pytest.mark.parametrize(
    "architecture",
    ["Qwen3ForCausalLM", "ChatGLMModel", "Qwen3VLForConditionalGeneration", "InternVLChatModel"],
)
def test_models_that_generate_text_are_no_pooling_models(architecture: str) -> None:
    """Names of generating architectures are recognised before the suffix Model."""
    assert read_shape({**DENSE, "architectures": [architecture]}).pooling is None


def test_a_head_with_one_label_scores() -> None:
    """vLLM serves /score and /rerank only for one label; two are transformers' default."""
    for labels, task in (
        ({"0": "a"}, Task.SCORE),
        ({"0": "a", "1": "b"}, Task.CLASSIFY),
        (None, Task.CLASSIFY),
    ):
        found = shape(architectures=["BertForSequenceClassification"], id2label=labels).pooling
        assert found is not None
        assert found.task is task


@pytest.mark.parametrize(
    ("pooling", "method"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, "LAST"),
        ({"pooling_mode_mean_tokens": True}, "MEAN"),
        ({"pooling_mode_cls_token": True, "include_prompt": True}, "CLS"),
        ({"pooling_mode": "cls", "include_prompt": True}, "CLS"),
        ({"embedding_dimension": 3}, ""),
    ],
)
def test_the_pooling_of_sentence_transformers_is_read(pooling: dict[str, Any], method: str) -> None:
    """Both spellings of the file are read, as vLLM reads them."""
    found = read_sentence_files(json.dumps(POOLING_MODULE), json.dumps(pooling), '{"max_seq_length": 256}')

    assert found == SentenceFiles(listed=True, method=method, max_length=256)


def test_a_decoder_of_sentence_transformers_embeds() -> None:
    """modules.json makes an embedding model of a causal language model; mean pooling needs whole prompts."""
    last, mean = (
        read_shape(DENSE, sentence=SentenceFiles(listed=True, method=method)).pooling
        for method in ("LAST", "MEAN")
    )

    assert last is not None
    assert mean is not None
    assert (last.task, last.caches_prefixes, mean.whole_prompts) == (Task.EMBED, True, True)


def test_positions_before_the_first_are_no_prompt() -> None:
    """RoBERTa counts positions from that after the padding token; other files may limit a prompt further."""
    roberta: dict[str, Any] = {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"]}

    assert shape(**roberta, pad_token_id=1, max_position_embeddings=514).max_len == 512
    assert shape(SentenceFiles(max_length=256)).max_len == 256


def test_files_in_32_bits_are_served_in_16() -> None:
    """vLLM serves float32 pooling models in float16: half of the files' size."""
    found = shape()
    facts = Facts(shape=found, checkpoint_bytes=checkpoint_bytes(found), source="test")
    made_plan = make_plan(pool(), facts, gpu="L4")

    assert found.dtype == "float16"
    assert facts.checkpoint_bytes == 4 * parameters(found)
    assert made_plan.memory.weights == pytest.approx(facts.checkpoint_bytes / 2, rel=0.001)


def test_weights_of_published_encoders_are_counted() -> None:
    """Parameters agree within 2 % with the published numbers: 335 M, 568 M, 33.4 M and 22.7 M; position
    embeddings and poolers are left out."""
    published = {
        "BAAI/bge-large-en-v1.5": 335.1e6,
        "BAAI/bge-m3": 567.8e6,
        "BAAI/bge-small-en-v1.5": 33.4e6,
        "sentence-transformers/all-MiniLM-L6-v2": 22.7e6,
    }
    for name, number in published.items():
        assert parameters(known(name).shape) == pytest.approx(number, rel=0.02), name


def test_files_without_the_output_head_are_recognised() -> None:
    """Files of an embedding model are taken to lack the output head if that comes closer to their size."""
    facts = made()
    whole = checkpoint_bytes(facts.shape)
    head = 2 * facts.shape.vocab * facts.shape.hidden
    without, with_head = (
        make_plan(
            pool(model={"task": "Embed"}),
            Facts(shape=facts.shape, checkpoint_bytes=size, source="t"),
            gpu="H100-80GB",
        )
        for size in (whole - head, whole)
    )

    assert without.memory.weights == pytest.approx(with_head.memory.weights, rel=0.001)
    assert without.memory.weights == pytest.approx(whole - head, rel=0.001)


def test_folders_and_kept_files_give_the_same_facts(tmp_path: Path) -> None:
    """The files of sentence-transformers are read from a folder, and from those kept in a status."""
    texts = {
        "config.json": json.dumps(DENSE),
        "modules.json": json.dumps(POOLING_MODULE),
        "1_Pooling/config.json": '{"pooling_mode_lasttoken": true}',
        "sentence_bert_config.json": '{"max_seq_length": 4096}',
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    config, modules, pooling, sentence = texts.values()
    files = ModelFiles(
        repository="a/b",
        revision="c",
        config=config,
        modules=modules,
        pooling_config=pooling,
        sentence_config=sentence,
        sentence_read=True,
    )

    found = from_folder(tmp_path).shape
    assert found == from_model_files(files).shape
    assert (found.max_len, found.length_known) == (4096, True)
    assert found.pooling is not None
    assert found.pooling.method == "LAST"


@given(st.sampled_from(ENCODERS), st.sampled_from([row.name for row in ROWS if row.vendor != "cpu"]))
def test_encoders_are_promised_no_cache(name: str, gpu: str) -> None:
    """On every GPU: one of it, no KV tokens, no flags or events of a cache, a step that holds a prompt."""
    found = plan(name, gpu)
    written = found.to_dict()

    assert found.verdict is not PlanVerdict.REFUSED
    assert (written["memory"]["kv_tokens"], written["memory"]["kv_gib"]) == (0, 0)
    assert found.layout.gpus == 1
    assert found.settings.batched_tokens >= found.settings.max_len
    assert found.settings.batched_tokens >= found.settings.sequences
    assert not {flag for flag in flags(found.argv) if "kv" in flag or "prefix" in flag or "parser" in flag}
    assert (found.kv_events, found.routes_by_prefix) == (False, False)


def test_a_decoder_caches_a_full_step() -> None:
    """The cache of an embedding model that was a decoder holds the longest prompt and a whole step."""
    found = plan("Qwen/Qwen3-Embedding-0.6B", "H100-80GB", engine={"maxModelLen": 2048})

    assert found.task is Task.EMBED
    assert found.memory.concurrency(2048) * 2048 >= found.settings.batched_tokens == 8192
    assert "--enable-prefix-caching" not in flags(found.argv)  # vLLM's own rule knows the pooling


def test_the_plan_says_the_runner_and_nothing_of_chats() -> None:
    """An embedding model gets --runner pooling, and no parsers although its type has some."""
    found = plan("Qwen/Qwen3-Embedding-0.6B", "L4")

    assert found.argv[found.argv.index("--runner") + 1] == "pooling"
    assert not flags(found.argv) & {
        "--tool-call-parser",
        "--reasoning-parser",
        "--enable-prompt-tokens-details",
    }
    assert "--runner" not in plan("Qwen/Qwen3-0.6B", "L4").argv


def test_a_length_that_was_not_looked_up_is_left_to_vllm() -> None:
    """vLLM refuses to start with more than sentence_bert_config.json allows, so --max-model-len is set only
    if that file was looked for, or the user sets it; steps hold all positions then."""
    roberta = {"model_type": "xlm-roberta", "architectures": ["XLMRobertaModel"], "pad_token_id": 1}
    config = {**BERT, **roberta, "max_position_embeddings": 8194}
    unknown, looked_for = (
        make_plan(pool(), Facts(shape=read_shape(config, sentence=files), source="t"), gpu="L4")
        for files in (None, SentenceFiles())
    )

    assert "--max-model-len" not in unknown.argv
    assert unknown.settings.batched_tokens == 8194
    assert looked_for.argv[looked_for.argv.index("--max-model-len") + 1] == "8192"


def test_a_reranker_of_words_gets_its_overrides() -> None:
    """Qwen3-Reranker scores by the words yes and no, which vLLM learns by --hf-overrides; the user's own
    overrides stay as they are."""
    own = ["--hf-overrides", '{"architectures":["Qwen3ForSequenceClassification"]}']
    by_plan = plan("Qwen/Qwen3-Reranker-0.6B", "L4")
    by_user = plan("Qwen/Qwen3-Reranker-0.6B", "L4", engine={"extraArgs": own})

    overrides = json.loads(by_plan.argv[by_plan.argv.index("--hf-overrides") + 1])
    assert overrides["classifier_from_token"] == ["no", "yes"]
    assert by_user.argv.count("--hf-overrides") == 1
    assert by_user.argv[-2:] == tuple(own)


def test_a_task_that_files_do_not_say_is_taken_and_doubted() -> None:
    """A chat model embeds if the user says so; a chat model of sentence-transformers can generate again."""
    embeds = plan("Qwen/Qwen3-8B", "H100-80GB", model={"task": "Embed"})
    writes = plan("Qwen/Qwen3-Embedding-0.6B", "L4", model={"task": "Generate"})

    assert (embeds.task, embeds.verdict) == (Task.EMBED, PlanVerdict.UNVERIFIED)
    assert (writes.task, writes.argv[writes.argv.index("--runner") + 1]) == (Task.GENERATE, "generate")


@pytest.mark.parametrize(
    ("field", "spec"),
    [
        ("spec.engine.decodeContextParallelSize", {"engine": {"decodeContextParallelSize": 2}}),
        ("spec.engine.kvCacheDtype", {"engine": {"kvCacheDtype": "FP8"}}),
        ("spec.workload.promptTokens", {"workload": {"promptTokens": 9000}}),
        ("spec.model.task", {"model": {"task": "Classify"}}),
    ],
)
def test_what_an_encoder_cannot_do_is_refused(field: str, spec: dict[str, Any]) -> None:
    """The refusal names the field and says what to do."""
    with pytest.raises(SpecError) as raised:
        plan("BAAI/bge-m3", "L4", **spec)

    assert raised.value.field == field
    assert "leave it out" in str(raised.value) or "lower it" in str(raised.value)


def test_a_model_too_large_for_its_gpu_takes_more_of_them() -> None:
    """A large embedding model is divided over GPUs like any other, and a refusal says what it lacks."""
    large = {
        **DENSE,
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
    }
    facts = Facts(shape=read_shape({**large, "architectures": ["LlamaModel"]}), source="t")

    short = pool(engine={"maxModelLen": 8192})
    assert make_plan(short, facts, gpu="H100-80GB").layout.tensor == 2
    refused = make_plan(pool(accelerator={"count": 1}), facts, gpu="L4")
    assert refused.verdict is PlanVerdict.REFUSED
    assert "lack" in refused.refusal


def test_engines_of_embeddings_publish_nothing_and_the_picker_asks_for_nothing() -> None:
    """No port, policy, tokenizer or condition for KV events; the picker routes by load."""
    found = rendered("embeddings")
    engine = one(found, "Deployment", "twig")["spec"]["template"]
    [container] = engine["spec"]["containers"]
    picker = one(found, "Deployment", "twig-epp")["spec"]["template"]["spec"]["containers"][0]

    assert [port["name"] for port in container["ports"]] == ["http"]
    assert engine["metadata"]["annotations"]["kvist.dev/kv-events"] == "false"
    settings = Settings.from_args(picker["args"])
    assert (settings.prefix_matching, settings.kv_events, settings.model) == (False, False, "")
    assert [note for note in found.notes if note.condition == "Precise"] == []


def test_a_pool_without_prefix_caching_is_routed_by_load() -> None:
    """``prefixCaching: Disabled`` of a chat model: the picker keeps no routing history either."""
    found = rendered("minimal", engine={"prefixCaching": "Disabled"})
    picker = one(found, "Deployment", "twig-epp")["spec"]["template"]["spec"]["containers"][0]

    assert Settings.from_args(picker["args"]).prefix_matching is False


def test_the_status_has_no_cache_that_an_encoder_lacks() -> None:
    """Neither the condition Precise nor the tokens that vLLM reports although nothing is cached."""
    seen = replace(WELL, kv_tokens=1234)
    found = status(subject("embeddings"), seen, {}, NOW)

    assert "Precise" not in conditions(found)
    assert "reportedKvTokens" not in found
    assert (found["plan"]["task"], found["plan"]["memory"]["kvTokens"]) == ("Embed", 0)
    assert found["plan"]["batch"] == {"tokens": 8192, "sequences": 256}


def test_the_files_of_sentence_transformers_are_kept_in_the_status() -> None:
    """A hub that is away later changes nothing about the task and the length."""
    files = ModelFiles(
        repository="Qwen/Qwen3-8B",
        revision="c",
        config=json.dumps(DENSE),
        modules=json.dumps(POOLING_MODULE),
        pooling_config='{"pooling_mode_lasttoken": true}',
        sentence_config='{"max_seq_length": 4096}',
        sentence_read=True,
    )
    kept = known_model(pool(), {"model": model_status(pool(), from_model_files(files), None)})

    assert kept is not None
    assert kept.files == files


def test_the_hub_is_asked_for_the_files_of_sentence_transformers() -> None:
    """The files of an embedding model are read; of a chat model none but modules.json is asked for."""

    class Hub(ModelHub):
        def __init__(self, files: dict[str, str]) -> None:
            super().__init__()
            self.files, self.asked = files, list[str]()

        def commit(self, repository: str, revision: str) -> str:
            return "c"

        def text(self, repository: str, revision: str, file: str) -> str | None:
            self.asked.append(file)
            return self.files.get(file)

        def sizes(self, repository: str, revision: str) -> dict[str, int]:
            return {"model.safetensors": 7}

    sentence = {
        "modules.json": json.dumps(POOLING_MODULE),
        "1_Pooling/config.json": '{"pooling_mode_mean_tokens": true}',
        "sentence_bert_config.json": '{"max_seq_length": 256}',
    }
    embeds, chats = (
        Hub({"config.json": json.dumps(BERT), **sentence}),
        Hub({"config.json": json.dumps(DENSE)}),
    )
    found, other = from_hub("a/b", "", embeds).shape, from_hub("a/b", "", chats).shape

    assert found.pooling is not None
    assert (found.pooling.method, found.max_len) == ("MEAN", 256)
    assert (other.pooling, other.length_known) == (None, True)
    assert set(sentence) <= set(embeds.asked)
    assert not {"1_Pooling/config.json", "sentence_bert_config.json"} & set(chats.asked)
