"""Promises of versions: tags are read, unknown ones get the nearest flags, other engines are refused."""

import json
from pathlib import Path

import pytest
from tests.operator import golden
from tests.operator.pools import plan, pool

from kvist_operator.engine_version import FOREIGN, engine_version, image_version, parse_version
from kvist_operator.errors import SpecError
from kvist_operator.flag_table import LATEST, VERSIONS, dotted


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("v0.33.0", (0, 33)),
        ("0.32.1rc1-cu130", (0, 32)),
        ("0.30", (0, 30)),
        ("1.0.0", (1, 0)),
        ("latest", None),
        ("nightly-abc", None),
        ("12", None),
        ("25.09-py3", None),
    ],
)
def test_versions_are_read_from_tags(text: str, version: tuple[int, int] | None) -> None:
    """Versions are read from release tags with any suffix; other tags, and dates, have none."""
    assert parse_version(text) == version


@pytest.mark.parametrize(
    ("image", "version"),
    [
        ("vllm/vllm-openai:v0.32.0", (0, 32)),
        ("registry:5000/vllm/vllm-openai:v0.31.0-cu129", (0, 31)),
        ("registry:5000/vllm", None),
        ("vllm/vllm-openai:v0.33.0@sha256:abc", (0, 33)),
        ("vllm/vllm-openai@sha256:abc", None),
        ("rocm/vllm:rocm7.0_py3.12_vllm_0.31.1", (0, 31)),
        ("acme/vllm:0.4.2", (0, 4)),
        ("nvcr.io/nvidia/vllm:25.09-py3", None),
        ("ghcr.io/llm-d/llm-d-cuda:v0.5.0", None),
        ("registry/internal:prod", None),
    ],
)
def test_an_image_s_tag_has_the_version(image: str, version: tuple[int, int] | None) -> None:
    """The port of a registry is not a tag, a digest has no version, and another product's is not vLLM's."""
    assert image_version(image) == version


@pytest.mark.parametrize("case", golden.IMAGES)
def test_plans_for_images_are_those_of_the_file(case: str) -> None:
    """Verdict, reasons and the whole command for each kind of tag equal the file; no argument is dropped."""
    kept = json.loads((Path(golden.FOLDER) / golden.IMAGES_FILE).read_text())
    found = golden.image(case)

    assert found == kept[case]
    assert len(found["args"]) >= 20
    assert (found["verdict"] == "unverified") == any("known version" in each for each in found["doubts"])


def test_only_the_version_of_the_flags_differs_between_images() -> None:
    """The plan for an older, newer or unreadable tag has the arguments of the nearest known version."""
    assert len({tuple(golden.image(case)["args"]) for case in golden.IMAGES}) == 1


def test_the_field_outweighs_the_tag() -> None:
    """With ``spec.engine.version`` a private image is verified, by that version's flags."""
    assert engine_version("registry/internal:prod", "0.32.1").known
    assert engine_version("acme/vllm:0.4.2", "0.31").flags == (0, 31)
    found = plan("Qwen/Qwen3-8B", "H100", engine={"image": "registry/internal:prod", "version": "0.32.0"})
    assert (str(found.verdict), found.doubts) == ("fits", ())


def test_an_unknown_version_says_what_to_set() -> None:
    """The doubt names the image, the assumed version and the field."""
    said = engine_version("registry/internal:prod").doubt
    assert "registry/internal:prod does not say which vLLM it has" in said
    assert said.endswith("set spec.engine.version")
    older = engine_version("vllm/vllm-openai:v0.29.0").doubt
    assert "vLLM 0.29 is not one of 0.30 to" in older
    assert "those of 0.30, the nearest known version" in older
    assert engine_version("vllm/vllm-openai:v0.99.0").flags == LATEST


@pytest.mark.parametrize(
    ("image", "engine"),
    [
        ("lmsysorg/sglang:v0.5.6", "SGLang"),
        ("ghcr.io/huggingface/text-generation-inference:3.3.4", "Text Generation Inference"),
        ("nvcr.io/nvidia/tensorrt-llm/release:1.2.0", "TensorRT-LLM"),
        ("ollama/ollama:0.12", "Ollama"),
        ("ghcr.io/ggml-org/llama.cpp:server-cuda", "llama.cpp"),
        ("nvcr.io/nim/meta/llama-3.1-8b-instruct:1.8", "NVIDIA NIM"),
        ("vllm-team/sglang:1", "SGLang"),
    ],
)
def test_the_image_of_another_engine_is_refused(image: str, engine: str) -> None:
    """An image is known by its name; the error names the field, the engine and an image to use."""
    with pytest.raises(SpecError, match=rf"^spec\.engine\.image: .*{engine}, .*use vllm/vllm-openai:v0"):
        pool(engine={"image": image})


def test_vllm_in_the_name_outweighs_another_engine() -> None:
    """An image with vLLM and another engine is taken."""
    image = "nvcr.io/nvidia/tritonserver:25.09-vllm-python-py3"
    assert pool(engine={"image": image}).engine.image == image
    assert all(name == name.lower() for name in FOREIGN)


def test_the_guide_names_the_known_versions() -> None:
    """The planning guide says which versions are known."""
    guide = Path(__file__).parents[2] / "docs" / "guides" / "planning.md"

    assert f"known for vLLM {dotted(VERSIONS[0])} to {dotted(LATEST)}" in guide.read_text()
