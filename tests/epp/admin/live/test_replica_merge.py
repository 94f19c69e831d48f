"""One document of several replicas."""

import copy

import pytest
from tests.epp.admin.live.documents import AT, document, endpoint, observed, pick

from kvist_epp.admin.live.replica_merge import merged, worst_first


def test_counts_of_replicas_add_up() -> None:
    """Requests, tokens, savings and the queue are sums; shares are of the sums, not means of shares."""
    one, other = document("a"), document("b")
    other["traffic"] |= {"true_tokens": 0, "requests_per_second": 2.5}
    other["queue"] |= {
        "requests": 3,
        "oldest_seconds": 4.5,
        "levels": [{"priority": 0, "requests": 3, "tokens": 10, "bytes": 5, "tenants": 1}],
    }
    found = merged(one, {"b": other})

    assert found["traffic"]["requests_per_second"] == 15.0
    assert found["traffic"]["saved_tokens"] == 34_000_000
    assert found["traffic"]["saved_gpu_seconds"] == 2134.0
    assert found["hit_rate"] == {"predicted": 0.8, "true": 0.39}
    assert (found["queue"]["requests"], found["queue"]["oldest_seconds"]) == (3, 4.5)
    assert found["queue"]["levels"] == [
        {"priority": 0, "requests": 3, "tokens": 10, "bytes": 5, "tenants": 1}
    ]
    assert found["ttft"]["predicted_seconds"]["count"] == 7500
    assert [row["requests_per_second"] for row in found["endpoints"]] == [8.4, 8.4, 8.4]


def test_each_replica_has_its_own_numbers() -> None:
    """The page names every replica with its figures, and the one that makes it."""
    other = document("b")
    other["traffic"]["requests_per_second"] = 1.0
    found = merged(document("a"), {"b": other})["replicas"]

    assert [(one["replica"], one["self"], one["requests_per_second"]) for one in found] == [
        ("a", True, 12.5),
        ("b", False, 1.0),
    ]
    assert found[1]["ttft"]["p50"] == pytest.approx(0.09, rel=0.2)


@pytest.mark.parametrize("answer", [None, {}, {"version": 2}, {**document("b"), "version": 2}])
def test_a_replica_without_a_usable_answer_is_shown_as_such(answer: dict[str, object] | None) -> None:
    """No answer, and one of another version, add nothing, and both are said."""
    alone = merged(document("a"), {})
    found = merged(document("a"), {"b": answer})

    assert found["replicas"][1] == {"replica": "b", "answers": False, "self": False}
    assert found["traffic"] == alone["traffic"]
    assert "the requests of replica b" in {one["what"] for one in found["unknown"]}


def test_replicas_that_disagree_on_an_endpoint_are_named() -> None:
    """The state is that of the replica that makes the page; another one's is beside it."""
    other = document("b", endpoints=2)
    other["endpoints"][1] |= {"state": "unreachable", "severity": 4}
    other["endpoints"].append(endpoint(77))
    rows = {row["name"]: row for row in merged(document("a"), {"b": other})["endpoints"]}

    assert (rows["serving/qwen-1"]["state"], rows["serving/qwen-1"]["seen_by"]) == ("ready", "b: unreachable")
    assert "seen_by" not in rows["serving/qwen-0"]
    assert rows["serving/qwen-77"]["seen_by"] == "only b knows it"


def test_histories_are_aligned_at_their_newest_points() -> None:
    """A replica that has just started adds to the last points only."""
    one, young = document("a"), document("b")
    young["history"] |= {
        "requests_per_second": [100.0],
        "predicted": [[0, 300]],
        "ttft": [observed(0.09, 10)],
        "queued": [],
    }
    found = merged(one, {"b": young})["history"]

    assert found["requests_per_second"][:-1] == [
        round(x, 3) for x in one["history"]["requests_per_second"][:-1]
    ]
    assert found["requests_per_second"][-1] == pytest.approx(
        one["history"]["requests_per_second"][-1] + 100, abs=0.01
    )
    assert found["predicted_share"][0] == 0.7
    assert found["predicted_share"][-1] == pytest.approx(one["history"]["predicted"][-1][0] / 400, abs=0.001)
    assert len(found["ttft_p50"]) == 29


def test_the_newest_picks_of_all_replicas_are_shown() -> None:
    """Decisions are in order of time, whichever replica made them."""
    one, other = document("a", picks=12), document("b")
    other["picks"] = [pick(99, at=AT + 200), pick(98, at=AT - 500)]
    found = merged(one, {"b": other})["picks"]

    assert len(found) == 12
    assert found[0]["id"].endswith("99")
    assert [one["at"] for one in found] == sorted((one["at"] for one in found), reverse=True)


def test_merging_leaves_its_inputs_as_they_are() -> None:
    """A document that another viewer gets is not changed by the merge."""
    one, other = document("a"), document("b")
    before = copy.deepcopy((one, other))
    merged(one, {"b": other})

    assert (one, other) == before


def test_the_observed_time_is_preferred() -> None:
    """Responses before KV events before predictions; the page says which it is."""
    found = document("a")
    assert merged(found, {})["ttft"]["shown"] == "observed"
    found["ttft"]["observed"] = observed(0.1, 0)
    assert merged(found, {})["ttft"]["shown"] == "prefilled"
    found["ttft"]["prefilled"] = observed(0.1, 0)
    assert merged(found, {})["ttft"]["shown_by"] == "predicted at the pick"


def test_worst_endpoints_come_first_and_numbers_count_as_numbers() -> None:
    """Severity decides, then the name as people read it."""
    rows = [{"name": name, "severity": severity} for name, severity in (("b-10", 0), ("b-9", 0), ("z", 4))]

    assert [row["name"] for row in worst_first(rows)] == ["z", "b-9", "b-10"]
