"""The index against a real server of LMCache: recorded requests, events and metrics; see
``tests.engine.tiers.record_lmcache``."""

import pytest
from tests.epp.kvevents.recorded_tiers import GOLDEN, NumberedTokens, recorded

from kvist_epp.index.byte_index import Index
from kvist_epp.index.cached_part import Member
from kvist_epp.index.lookup import Lookup
from kvist_epp.index.routing_history import RoutingHistory
from kvist_epp.kvevents.ingestion import Ingestor

LMCACHE = GOLDEN.with_name("lmcache-0.5.6.msgpack.gz")
MODES = ("engine-driven", "server-driven")
ENGINE, OTHER, SERVER = "ns/pod", "ns/other", "lmcache/n1"


class Following:
    """A picker's index and look-up of two engines that use one server, of which one was recorded."""

    def __init__(self) -> None:
        self.words = NumberedTokens()
        self.index = Index()
        self.ingestor = Ingestor(self.index, self.words, clock=lambda: 0.0)
        self.lookup = Lookup(self.index, RoutingHistory())
        self.lookup.storages, self.lookup.chunks = self.ingestor.tiers.numbers, self.ingestor.tiers.chunks
        for endpoint in (ENGINE, OTHER):
            self.ingestor.add_publisher(f"{endpoint}/0", endpoint, SERVER)
            number = self.index.publisher(f"{endpoint}/0")
            self.lookup.join(endpoint, Member((number,), block_size=32, storage=SERVER))

    def apply(self, payload: bytes) -> None:
        """Apply one message of the engine, and finish all checks."""
        self.ingestor.apply(f"{ENGINE}/0", self.ingestor.decode(payload))
        while self.ingestor.checker.step():
            pass
        self.ingestor.expire()
        while self.ingestor.needs_sweep:
            self.ingestor.sweep()

    def sources(self, endpoint: str, prompt: list[int], salt: str | None) -> dict[str, int]:
        """Return the tokens that the picker expects from GPU and server."""
        found = self.lookup.look((None, salt), [self.words.text(prompt)], learn=False)
        part = found.hits.get(endpoint)
        server = part.lower.get("LMCACHE", 0) if part else 0
        return {"device": part.tokens - server if part else 0, "external_unspecified": server}


@pytest.mark.parametrize("mode", MODES)
def test_a_real_server_s_part_is_predicted_request_by_request(mode: str) -> None:
    """Before each recorded request, the picker says how many tokens come from GPU and server, as the engine's
    counters say afterwards, plain and salted; the one exception is text that the server has under two salts,
    where it reports one of them alone."""
    following, wrong, total = Following(), [], dict.fromkeys(("device", "external_unspecified"), 0)
    for step, true in recorded(mode, LMCACHE).with_sources():
        predicted = following.sources(ENGINE, step.prompt, step.salt)
        if predicted != {source: true.get(source, 0) for source in predicted}:
            wrong.append((step.name, step.salt))
        for source, tokens in predicted.items():
            total[source] += tokens
        for _, payload in step.batches:
            following.apply(payload)

    assert wrong == ([] if mode == "engine-driven" else [("server", "tenant")])
    assert min(total.values()) >= 640


@pytest.mark.parametrize("mode", MODES)
def test_another_engine_is_expected_to_load_what_this_one_has_stored(mode: str) -> None:
    """The recorded prompt counts for both engines, until its server is killed and, where the server is the
    source of reports, everything is withdrawn."""
    following, seen = Following(), list[int]()
    steps = recorded(mode, LMCACHE).steps
    for step in steps:
        for _, payload in step.batches:
            following.apply(payload)
        seen.append(following.sources(OTHER, steps[0].prompt, None)["external_unspecified"])
    away = [step.name for step in steps].index("away")

    assert set(seen[:away]) == {320}
    assert seen[-1] == (320 if mode == "engine-driven" else 0)
