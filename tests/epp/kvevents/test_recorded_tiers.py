"""The index against a real engine's tiers: recorded requests, events and metrics of vLLM 0.32."""

import pytest
from tests.epp.kvevents.recorded_tiers import MODES, NumberedTokens, recorded

from kvist_epp.engines.vllm.kv_events import decode
from kvist_epp.index.byte_index import Index
from kvist_epp.index.tree.matches import Hit
from kvist_epp.kvevents.ingestion import Ingestor
from kvist_epp.kvevents.observation import Observation

SOURCES = {"CPU": "host", "STORAGE": "disk", "SHARED": "disk"}
COLD = 2
"""Requests of the warm-disk run, whose blocks no event of that engine has announced."""


class Following:
    """A picker's index that follows one engine."""

    def __init__(self) -> None:
        self.words = NumberedTokens()
        self.index = Index()
        self.ingestor = Ingestor(self.index, self.words, clock=lambda: 0.0)

    def apply(self, payload: bytes) -> list[Observation]:
        """Apply one batch, and finish all checks."""
        seen = self.ingestor.apply("ns/pod/0", decode(payload))
        while self.ingestor.checker.step():
            pass
        return seen

    def hit(self, prompt: list[int], salt: str | None) -> Hit:
        """Return what the index says of a prompt."""
        matches = self.index.match((None, salt), self.words.text(prompt))
        return matches.of(self.index.publisher("ns/pod/0"))


@pytest.mark.parametrize("mode", ["self-describing", "placeholders"])
def test_a_real_engine_s_tiers_are_predicted_request_by_request(mode: str) -> None:
    """Before each recorded request, the index says how many tokens come from GPU, host and disk, exactly as
    the engine's counters say afterwards; plain and salted, with and without token ids in the events."""
    following, wrong, total = Following(), [], dict.fromkeys(("device", "host", "disk"), 0)
    for step, true in recorded(mode).with_sources():
        hit = following.hit(step.prompt, step.salt)
        predicted = {"device": hit.tokens - sum(hit.lower.values()), "host": 0, "disk": 0}
        for medium, tokens in hit.lower.items():
            predicted[SOURCES[medium]] += tokens
        if predicted != {source: true[source] for source in predicted}:
            wrong.append((step.name, predicted, true))
        for source, tokens in predicted.items():
            total[source] += tokens
        for _, payload in step.batches:
            following.apply(payload)

    assert wrong == []
    assert min(total.values()) >= 640


@pytest.mark.parametrize("mode", MODES)
def test_the_first_event_of_a_request_shows_the_gpu_s_hit_and_what_was_loaded(mode: str) -> None:
    """After a load the first event of a request has no parent and covers what was loaded: the hit on the GPU
    is its parent's depth, and loaded tokens do not count as computed."""
    following = Following()
    for step, true in recorded(mode).with_sources():
        seen = [one for _, payload in step.batches for one in following.apply(payload)]
        first = [one for one in seen if one.session == step.session and one.cached is not None]
        assert [one.cached for one in first] in ([], [true["device"]])
        assert bool(first) or step.cached == true["device"] > 0
        loaded = true["host"] + true["disk"]
        assert sum(one.loaded for one in seen) == loaded
        assert sum(one.prefilled for one in seen) <= len(step.prompt) - step.cached


@pytest.mark.parametrize("mode", MODES)
def test_after_the_last_recorded_event_nothing_waits(mode: str) -> None:
    """Every event of a tier has found its place: no block of a real engine waits, or was given up."""
    following = Following()
    for step in recorded(mode).steps:
        for _, payload in step.batches:
            following.apply(payload)
    following.ingestor.expire()
    stats = following.ingestor.stats("ns/pod/0")

    assert (stats.held_unknown, stats.orphans_dropped, stats.opaque_blocks) == (0, 0, 0)
    assert following.index.blocks(following.index.publisher("ns/pod/0"))["CPU"] >= 20
