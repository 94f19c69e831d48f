"""The vLLM of an image: its version, and the known version whose flags it gets. Pure."""

import re
from dataclasses import dataclass
from typing import Final

from kvist_operator.errors import SpecError

from .flag_table import VERSIONS, Version, dotted, nearest_version

FIELD: Final = "spec.engine.version"
FOREIGN: Final = {
    "sglang": "SGLang",
    "text-generation-inference": "Text Generation Inference",
    "text-embeddings-inference": "Text Embeddings Inference",
    "tensorrt": "TensorRT-LLM",
    "trtllm": "TensorRT-LLM",
    "tritonserver": "Triton Inference Server",
    "nvcr.io/nim/": "NVIDIA NIM",
    "ollama": "Ollama",
    "llama.cpp": "llama.cpp",
    "llama-cpp": "llama.cpp",
    "llamacpp": "llama.cpp",
    "lmdeploy": "LMDeploy",
    "mlc-llm": "MLC LLM",
    "localai": "LocalAI",
    "local-ai": "LocalAI",
    "djl-serving": "DJL Serving",
    "openvino": "OpenVINO Model Server",
    "koboldcpp": "KoboldCpp",
    "mistral.rs": "mistral.rs",
    "deepspeed": "DeepSpeed",
}
"""Part of an image's name, in lower case → the engine in it; ``vllm`` in the name outweighs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineVersion:
    """The version of an engine."""

    stated: Version | None
    """By ``spec.engine.version`` or the image's tag; None if neither has one."""
    flags: Version
    """The known version whose flags and memory are assumed."""
    source: str
    """Where the version is from."""
    doubt: str = ""
    """Why a plan for it is unverified; empty if the version is known."""

    @property
    def known(self) -> bool:
        """Whether the flags are those of this very version."""
        return self.stated == self.flags

    def __str__(self) -> str:
        return dotted(self.stated) if self.stated else "unknown"


def parse_version(text: str) -> Version | None:
    """Return the version in a tag like ``v0.32.1`` or ``0.33.0rc1-cu130``; None for ``latest``.

    A first number above 9 is a date, not a version of vLLM.
    """
    found = re.match(r"v?(\d)\.(\d+)(?:\D|$)", text)
    return (int(found[1]), int(found[2])) if found else None


def image_version(image: str) -> Version | None:
    """Return the version in the tag of an image; None if it has none.

    A tag such as ``rocm7.0_vllm_0.31.1`` names vLLM itself; the tag of an image without vllm in its last
    name is the version of something else.
    """
    name, _, _ = image.partition("@")
    repository, colon, tag = name.rpartition(":")
    if not colon or "/" in tag:
        return None
    inside = re.search(r"vllm[-_]?(v?\d.*)", tag.lower())
    if inside:
        return parse_version(inside[1])
    return parse_version(tag) if "vllm" in repository.rpartition("/")[2].lower() else None


def engine_version(image: str, given: str = "") -> EngineVersion:
    """Return the version that ``spec.engine.version`` gives, else that of the image's tag."""
    stated = parse_version(given) if given else image_version(image)
    flags = nearest_version(stated)
    source = FIELD if given else "tag of spec.engine.image"
    doubt = "" if stated == flags else _doubt(image, stated, flags, given)
    return EngineVersion(stated=stated, flags=flags, source=source, doubt=doubt)


def _doubt(image: str, stated: Version | None, flags: Version, given: str) -> str:
    known = f"{dotted(VERSIONS[0])} to {dotted(VERSIONS[-1])}"
    if stated is None:
        return (
            f"the tag of {image} does not say which vLLM it has: flags and memory are those of "
            f"{dotted(flags)}, the newest known version; set {FIELD}"
        )
    assumed = f"flags and memory are those of {dotted(flags)}, the nearest known version"
    remedy = "" if given else f"; set {FIELD} if the image has another"
    return f"vLLM {dotted(stated)} is not one of {known}: {assumed}{remedy}"


def check_image(image: str, path: str, instead: str) -> None:
    """Refuse the image of another engine; ``instead`` is an image to use.

    Raises:
        SpecError: the message names the engine.
    """
    name = image.lower().partition("@")[0]
    engine = next((engine for part, engine in FOREIGN.items() if part in name), "")
    if engine and "vllm" not in name.rpartition("/")[2]:
        problem = f"{image!r} is an image of {engine}, and a plan is arguments of vLLM: use {instead}"
        raise SpecError(path, f"{problem}, or another image with vLLM in its name")
