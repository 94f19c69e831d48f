"""Records of decisions whether to compute a prompt elsewhere, as pages show them. Pure."""

from dataclasses import dataclass

from kvist_epp.scheduling.split_decision import SplitDecision


@dataclass(slots=True)
class SplitRecord:
    """A split request, as the decision log keeps it."""

    split: SplitDecision
    prefill_seconds: float | None = None
    """Duration of leg 1; None: it has not ended, or the picker did not send it."""
    fallback: str = ""
    """Why the decode endpoint computes the prompt nevertheless; empty: it does not."""

    def document(self) -> dict[str, object]:
        """Return what pages show."""
        return split_document(self.split) | {
            "prefill_seconds": None if self.prefill_seconds is None else round(self.prefill_seconds, 6),
            "fallback": self.fallback,
        }


def split_document(split: SplitDecision) -> dict[str, object]:
    """Return a decision and its terms as pages show them."""
    return {
        "chosen": split.chosen,
        "reason": split.reason,
        "prefill": split.prefill.endpoint.hostport,
        "decode": split.decode.endpoint.hostport,
        "transferred_tokens": split.transferred_tokens,
        "terms": {name: round(seconds, 6) for name, seconds in split.split_terms.items()},
        "without": {name: round(seconds, 6) for name, seconds in split.whole_terms.items()},
    }
