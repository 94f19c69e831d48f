"""The documents of the debug pages."""

import msgspec

from kvist_epp.admin.explained import pick_document
from kvist_epp.admin.views import fleet_document
from kvist_epp.endpoints.endpoint import Endpoint
from kvist_epp.endpoints.scraper import EngineState
from kvist_epp.load.ledger import Ledger
from kvist_epp.scheduling.pick import Scored

A = Endpoint("a", "ns", "10.0.0.1", 8000, {"k": "v"}, "tcp://10.0.0.1:5557", ranks=2)
B = Endpoint("b", "ns", "fd00::2", 8000)


def test_pick_document_is_the_fixed_interface() -> None:
    """Each row has the fields others rely on; picked are the eligible, best first, up to the limit."""
    rows = [
        Scored(B, True, 16, 64, 10, 5, 0.0123456789, "cost"),
        Scored(A, False, 0, 0, 26, 0, 1.0, "unreachable"),
    ]

    assert pick_document("precise", 104, rows) == {
        "mode": "precise",
        "prompt_bytes": 104,
        "endpoints": [
            {
                "endpoint": "[fd00::2]:8000",
                "name": "ns/b",
                "eligible": True,
                "matched_tokens": 16,
                "matched_bytes": 64,
                "uncached_tokens": 10,
                "owed_tokens": 5,
                "predicted_ttft_seconds": 0.012346,
                "reason": "cost",
            },
            {
                "endpoint": "10.0.0.1:8000",
                "name": "ns/a",
                "eligible": False,
                "matched_tokens": 0,
                "matched_bytes": 0,
                "uncached_tokens": 26,
                "owed_tokens": 0,
                "predicted_ttft_seconds": 1.0,
                "reason": "unreachable",
            },
        ],
        "picked": ["[fd00::2]:8000"],
        "full": False,
    }


def test_fleet_document_joins_scrapes_and_books() -> None:
    """An endpoint shows its state and what it owes, and the document can be written as JSON."""
    ledger = Ledger(default_rate=1000.0)
    ledger.routed("s", "ns/a", 500, 900, now=1.0)
    document = fleet_document({"ns/a": EngineState(A)}, ledger, now=1.1)
    read = msgspec.json.decode(msgspec.json.encode(document))["endpoints"][0]

    assert (read["state"], read["problem"], read["owed_tokens"], read["requests"]) == (
        "new",
        "not scraped yet",
        400,
        1,
    )
    assert read["kv_events"] == ["tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558"]
