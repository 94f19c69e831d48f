"""What hand-over has done: numbers for the metrics page."""

from dataclasses import dataclass


@dataclass(slots=True)
class Given:
    """Counters since the picker started."""

    begun: int = 0
    """Beginnings that were decided on."""
    dropped: int = 0
    """Those of them that were given up."""
    kept: int = 0
    """Times that one was asked for again, so that its engine kept it."""
    steps: int = 0
    """Answered by engines."""
    failed: int = 0
    """Not answered, or with an error."""
    tokens: int = 0
    """Prompt tokens that the steps were to compute."""
    seconds: float = 0.0
    """From asking to the answer, over all steps."""
