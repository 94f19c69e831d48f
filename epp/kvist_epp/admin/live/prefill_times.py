"""Time from the pick to the end of prefill, as the engines' KV events show it. Pure.

Where responses do not pass the picker this is the closest that it gets to the time to the first token: the
step that computes the last block of a prompt also makes the first token. Events report whole blocks, so
a prompt's remainder of less than a block may end a step later.
"""

from kvist_epp.load.in_flight import Attempt, RequestListener, RequestState
from kvist_epp.telemetry.counters import TIME_TO_FIRST_TOKEN_BUCKETS, Histogram


class PrefillTimes(RequestListener):
    """Notes each request of this replica once, when its events first say that its prompt is computed."""

    def __init__(self) -> None:
        self.histogram = Histogram(TIME_TO_FIRST_TOKEN_BUCKETS)
        self._open: set[Attempt] = set()

    def on_routed(self, attempt: Attempt) -> None:
        """Apply a notification; see ``RequestListener``."""
        self._open.add(attempt)

    def on_moved(self, old: Attempt, new: Attempt) -> None:
        """See ``RequestListener``: the time on the endpoint that served the request counts."""
        self._open.discard(old)
        self._open.add(new)

    def on_progress(self, attempt: Attempt) -> None:
        """Apply a notification; see ``RequestListener``."""
        if attempt.request.state is RequestState.DECODING and attempt in self._open:
            self._open.remove(attempt)
            self.histogram.observe(attempt.last_event_at - attempt.routed_at)

    def on_ended(self, attempt: Attempt) -> None:
        """Apply a notification; see ``RequestListener``."""
        self._open.discard(attempt)
