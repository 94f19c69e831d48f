"""All that is known of one endpoint, in one record."""

from dataclasses import dataclass, field

from kvist_epp.endpoints.engine_state import EngineState
from kvist_epp.index.cached_part import Member
from kvist_epp.index.index_accuracy import AccuracyMonitor
from kvist_epp.index.last_block import LastBlock
from kvist_epp.index.storage_trust import StorageTrust
from kvist_epp.index.tier_accuracy import TierAccuracy
from kvist_epp.scheduling.pick import Candidate


@dataclass(slots=True, eq=False, kw_only=True)
class EndpointState(Candidate):
    """All that is known of one endpoint, besides the events themselves and the prompts routed there.

    ``load`` is the load tracker's, ``scrape`` the scraper's and ``member`` the look-up's: each changes its
    own, and all are dropped together when the endpoint leaves.
    """

    scrape: EngineState
    member: Member
    last_block: LastBlock = field(default_factory=LastBlock)
    accuracy: AccuracyMonitor = field(default_factory=AccuracyMonitor)
    tiers: TierAccuracy = field(default_factory=TierAccuracy)
    storage_trust: StorageTrust = field(default_factory=StorageTrust)
    restarts: int = 0
    """Restarts of its engine that ``accuracy`` takes account of."""

    def on_cache_truth(self, predicted: int, cached: int, now: float, otherwise: int | None = None) -> bool:
        """Compare the tokens that the index holds of a request on the GPU with those that its engine had;
        return whether it is known since now that the engine computes last blocks again, or that it does not.

        ``otherwise``: see ``InFlightRequest.indexed_otherwise``.
        """
        last = self.last_block
        if otherwise is None:
            otherwise = last.otherwise(predicted, self.member.hit_block_size)
        changed = last.on_cache_truth(predicted, cached, otherwise)
        self.member.drops_last_block = self.last_block.dropped  # also of a member that was made anew
        if changed and self.last_block.changes == 1:
            self.accuracy.on_engine_restart()  # the errors so far are explained
        else:
            self.accuracy.on_cache_truth(predicted, cached, now)
        return changed
