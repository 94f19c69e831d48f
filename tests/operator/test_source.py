"""Promises of ``source``: facts from the spec, a folder, the catalogue, and a hub of our own on loopback."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from tests.fakes.hub import Hub, hub_with
from tests.operator.pools import DENSE, pool

from kvist_operator.errors import ModelError, ModelNotFound
from kvist_operator.models import catalogue, source
from kvist_operator.models.shape import checkpoint_bytes, parameters
from kvist_operator.models.source import ModelHub, draft_facts, from_folder, from_hub, model_facts
from kvist_operator.spec.pool import ModelRef, Source

LOAD = """
import json, sys
from kvist_operator.errors import ModelError
from kvist_operator.models.source import ModelHub, from_hub
try:
    found = from_hub(sys.argv[1], "main", ModelHub())
    print(json.dumps([found.shape.describe(), found.checkpoint_bytes, found.checkpoint_source]))
except ModelError as error:
    print(json.dumps(str(error)))
"""


class Shelf(ModelHub):
    """A hub of files in memory."""

    def __init__(self, files: Mapping[str, str], sizes: Mapping[str, int]) -> None:
        self._files, self._sizes = files, sizes

    def commit(self, repository: str, revision: str) -> str:
        return revision or "main"

    def text(self, repository: str, revision: str, file: str) -> str | None:
        return self._files.get(file)

    def sizes(self, repository: str, revision: str) -> Mapping[str, int]:
        return self._sizes


@pytest.fixture
def hub() -> Iterator[str]:
    """A hub with one model of two files of weights."""
    files = {
        "config.json": json.dumps(DENSE).encode(),
        "model-00001-of-00002.safetensors": b"12345",
        "model-00002-of-00002.safetensors": b"123",
        "original/copy.safetensors": b"1234567",
    }
    with hub_with(files) as address:
        yield address


def load(repository: str, endpoint: str, home: Path, **environment: str) -> object:
    """Return the facts that the real client finds; a process, because it reads the environment on import."""
    settings = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, repository],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_the_hub_s_own_client_finds_shape_and_size_and_no_weights(hub: str, tmp_path: Path) -> None:
    """The client fetches config.json and only the sizes of the weight files."""
    found = load("kvist/twig", hub, tmp_path)

    assert found == ["32 layers of GQA 32/8, bfloat16", 8, "size of the files"]
    assert not any("safetensors" in path for path in Hub.served)


def test_the_index_has_the_size_and_the_cache_keeps_both(hub: str, tmp_path: Path) -> None:
    """A second plan reads config.json from the cache, and the checkpoint's size is the index's total."""
    Hub.files["model.safetensors.index.json"] = b'{"metadata": {"total_size": 16060522496}}'
    first = load("kvist/twig", hub, tmp_path)
    served = [path for path in Hub.served if path.endswith("config.json")]
    load("kvist/twig", hub, tmp_path)

    assert first == ["32 layers of GQA 32/8, bfloat16", 16_060_522_496, "total_size of the safetensors index"]
    assert [path for path in Hub.served if path.endswith("config.json")] == served


@pytest.mark.parametrize(
    ("repository", "environment", "remedy"),
    [
        ("kvist/absent", {}, "HF_TOKEN"),
        ("kvist/twig", {"HF_HUB_OFFLINE": "1"}, "spec.model.shape"),
    ],
)
def test_what_the_hub_does_not_give_names_the_remedy(
    hub: str, tmp_path: Path, repository: str, environment: dict[str, str], remedy: str
) -> None:
    """A wrong name, and an empty cache without a hub, are errors with a remedy."""
    said = load(repository, hub, tmp_path, **environment)

    assert isinstance(said, str)
    assert (repository in said, remedy in said) == (True, True)


def test_what_was_read_once_is_read_again_without_the_hub(hub: str, tmp_path: Path) -> None:
    """A hub that goes away leaves the files of its last commit in the cache of its client."""
    before = load("kvist/twig", hub, tmp_path)
    nowhere = load("kvist/twig", "http://127.0.0.1:9", tmp_path)

    assert isinstance(nowhere, list)
    assert nowhere[0] == before[0]  # type: ignore[index]


def test_an_unknown_model_without_a_hub_fails_at_once(tmp_path: Path) -> None:
    """One connection is tried: neither a request, nor a download, nor the import of the hub's client."""
    script = """
import sys
from kvist_operator.models.source import model_facts
from kvist_operator.spec.pool import ModelRef, Source
try:
    model_facts(ModelRef(kind=Source.HUB, location="Qwen/Qwen3-9B"))
except Exception as error:
    print(error, "huggingface_hub" in sys.modules)
"""
    environment = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    )

    assert "similar names there: Qwen/Qwen3.5-9B" in done.stdout
    assert (
        "let this machine reach the hub (HF_ENDPOINT), or give the facts as spec.model.shape" in done.stdout
    )
    assert done.stdout.split()[-1] == "False"


async def test_a_hub_that_drops_packets_is_given_up_after_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that never succeeds, and a name that is never found, do not hold up the plan."""
    monkeypatch.setattr(source, "CONNECT_SECONDS", 0.05)
    forever = threading.Event()

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        forever.wait()
        raise OSError(f"{address} did not answer in {timeout} s")

    monkeypatch.setattr("socket.create_connection", connect)
    for name in ("HTTPS_PROXY", "https_proxy", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    try:
        with pytest.raises(TimeoutError, match=r"hub\.example does not answer"):
            source.check_connection("https://hub.example")
    finally:
        forever.set()


def test_the_connection_goes_where_the_client_would_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a proxy that is the proxy, and offline nothing is tried."""
    tried: list[tuple[str, int]] = []

    def connect(address: tuple[str, int], timeout: float) -> socket.socket:
        tried.append(address)
        return socket.socket()

    monkeypatch.setattr("socket.create_connection", connect)
    for name in ("https_proxy", "no_proxy", "NO_PROXY", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy.example:3128")
    source.check_connection("https://hub.example")
    monkeypatch.delenv("HTTPS_PROXY")
    source.check_connection("https://hub.example")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match="HF_HUB_OFFLINE is set"):
        source.check_connection("https://hub.example")

    assert tried == [("proxy.example", 3128), ("hub.example", 443)]


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("qwen/qwen2.5-7b-instruct", "Qwen/Qwen2.5-7B-Instruct"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B-Instruct"),
        ("THUDM/GLM-5", "zai-org/GLM-5"),
        ("unsloth/Qwen2.5-7B-Instruct", ""),
        ("acme/none", ""),
    ],
)
def test_other_spellings_and_former_names_are_found(spelled: str, name: str) -> None:
    """Case and names that the hub redirects do not matter; a copy elsewhere may be quantised."""
    assert catalogue.listed_name(spelled) == name


def test_every_entry_has_the_number_of_weights_in_its_name() -> None:
    """Names such as Qwen2.5-7B or Falcon3-10B round the number of weights, so that an entry with wrong facts
    is noticed; exceptions are names that count otherwise."""
    checked = 0
    for name in catalogue.catalogue():
        found = re.search(r"-(\d+(?:\.\d+)?)B(?![a-z])", name)
        if not found or name in OTHERWISE:
            continue
        facts = catalogue.from_catalogue(name)
        assert facts is not None
        stated, counted = float(found[1]), parameters(facts.shape) / 1e9
        assert stated / 1.15 <= counted <= stated * 1.3 + 0.15, (name, counted)
        checked += 1
    assert checked > 60


OTHERWISE = {
    "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    "tiiuae/Falcon3-1B-Instruct",
}
"""Names with the weights that are used for a token, or without those of the embedding."""


def test_a_repository_of_gguf_files_is_refused_with_the_reason() -> None:
    """GGUF is refused, because vLLM does not load it, and other formats are named."""
    with pytest.raises(ModelError, match=r"GGUF checkpoints are refused.*AWQ, GPTQ, FP8"):
        from_hub("kvist/twig-GGUF", "", Shelf({}, {"twig-Q4_K_M.gguf": 1}))


def test_modelopt_s_file_is_read_from_the_hub() -> None:
    """The quantization is read from the file beside config.json."""
    beside = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}
    files = {"config.json": json.dumps(DENSE), "hf_quant_config.json": json.dumps(beside)}

    assert from_hub("kvist/twig", "", Shelf(files, {})).shape.quantization.label == "FP8"


def test_a_folder_is_read_and_measured(tmp_path: Path) -> None:
    """The facts of a folder come from config.json and the size of its safetensors files."""
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    (tmp_path / "model.safetensors").write_bytes(b"x" * 100)
    found = model_facts(pool(str(tmp_path)).model)

    assert (found.checkpoint_bytes, found.source) == (100, f"folder {tmp_path}")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, r"there is no config\.json: give the facts as spec\.model\.shape"),
        ({"twig.gguf": ""}, "GGUF"),
        ({"config.json": "{"}, "is not JSON"),
        ({"config.json": "[]"}, "is not a JSON object"),
    ],
)
def test_an_unusable_folder_is_refused(tmp_path: Path, files: dict[str, str], said: str) -> None:
    """The error names the file and what is wrong with it."""
    for name, text in files.items():
        (tmp_path / name).write_text(text)

    with pytest.raises(ModelError, match=said):
        from_folder(tmp_path)


def test_the_catalogue_answers_without_a_hub() -> None:
    """The catalogue knows its repositories in any case of letters, with a published or computed size."""
    told, computed = (
        model_facts(pool(f"hf://{name}").model) for name in ("qwen/qwen3-32b", "moonshotai/Kimi-K2.5")
    )

    assert told.checkpoint_bytes == 65_524_246_528
    assert (computed.checkpoint_bytes, computed.checkpoint_source) == (0, "computed from the shape")


def test_a_pinned_revision_is_requested_from_the_hub() -> None:
    """A pinned revision is not taken from the catalogue, which describes the newest one only."""
    shelf = Shelf({"config.json": json.dumps(DENSE)}, {})
    found = model_facts(pool("hf://Qwen/Qwen3-32B", model={"revision": "abc"}).model, shelf)

    assert found.source == "hub, Qwen/Qwen3-32B at abc"


def test_what_the_user_says_wins() -> None:
    """A shape in the spec takes precedence, for clusters without a hub."""
    shape = {"config": DENSE, "checkpointSize": "15Gi"}
    found = model_facts(pool("hf://Qwen/Qwen3-32B", model={"shape": shape}).model)

    assert found.checkpoint_bytes == 15 << 30
    assert found.shape.model_type == "llama"


@pytest.mark.parametrize("source", ["pvc://claim/llama", "oci://registry/llama:1", "/models/absent"])
def test_weights_that_cannot_be_looked_into_need_a_shape(source: str) -> None:
    """The error says which fields to set."""
    with pytest.raises(
        ModelNotFound, match=r"spec\.model\.shape\.config .* spec\.model\.shape\.checkpointSize"
    ):
        model_facts(pool(source).model)


def test_a_draft_model_is_found_like_a_model() -> None:
    """A draft model is found with or without the scheme."""
    found = draft_facts("hf://Qwen/Qwen3-0.6B", None)

    assert checkpoint_bytes(found.shape) == pytest.approx(1.19e9, rel=0.01)


def test_a_pinned_model_of_the_catalogue_needs_the_hub_for_its_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The error does not say that the catalogue lacks it, and names the way to plan without the hub."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))

    with pytest.raises(ModelNotFound) as error:
        model_facts(ModelRef(kind=Source.HUB, location="Qwen/Qwen3-8B", revision="main"))

    said = str(error.value)
    assert "the catalogue, which has it, has no revisions, and the hub did not answer" in said
    assert "leave spec.model.revision out, to plan with the catalogue's facts" in said
