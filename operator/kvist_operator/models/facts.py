"""A model as far as it is known, and who says so."""

from dataclasses import dataclass
from typing import Final

from .shape import ModelShape

COMPUTED: Final = "computed from the shape"


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedModel:
    """A model, and the size of its files where that is known."""

    shape: ModelShape
    checkpoint_bytes: float = 0
    """0 = computed from the shape."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts of a model that a plan is made from; the sources are shown to users."""

    model: SizedModel
    source: str
    checkpoint_source: str = COMPUTED
    tool_parser: str = ""
    reasoning_parser: str = ""
    remote_code: bool = False
    """The catalogue knows that vLLM needs the repository's own code."""
