"""Trust in a label of shared storage: what an engine finds there decides whether its endpoint shares it."""

from kvist_epp.index.storage_trust import PARTED_SECONDS, StorageTrust

SHORTEST, LONGEST = PARTED_SECONDS


def test_one_miss_parts_nobody() -> None:
    """Storage that was wiped once stays shared, and one that gave something in between counts anew."""
    trust = StorageTrust()
    parted = []
    for now in range(5):
        parted.append(trust.on_missed(float(now)))
        trust.on_found()
    assert parted == [False] * 5
    assert not trust.doubtful


def test_each_parting_takes_twice_as_long() -> None:
    """An endpoint that never finds anything tries again after 5 minutes, then 10, and at last once a day."""
    trust, now, waits = StorageTrust(), 100.0, []
    trust.on_missed(now)
    for _ in range(12):
        assert trust.on_missed(now)
        began = now
        while not trust.rejoins(now):
            now += SHORTEST / 2
        waits.append(now - began)
    assert waits[:3] == [SHORTEST, 2 * SHORTEST, 4 * SHORTEST]
    assert waits[-1] == LONGEST


def test_it_rejoins_once_and_stays_doubtful() -> None:
    """After its time an endpoint shares its storage again; a miss parts it at once, a find clears it."""
    trust = StorageTrust()
    trust.on_missed(0.0)
    trust.on_missed(0.0)
    assert [trust.rejoins(now) for now in (SHORTEST - 1, SHORTEST, SHORTEST + 1)] == [False, True, False]
    assert trust.doubtful
    trust.on_found()
    assert not trust.on_missed(1000.0)
    assert trust.on_missed(1000.0)
    assert trust.rejoins(1000.0 + SHORTEST)
