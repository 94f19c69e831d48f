"""The output of ``kvist explain``; ``tests/data_plane/test_explain.py`` runs it against real pickers."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist.__main__ import main
from kvist.explain_command import table, verdict, went, would_go

NAMES = ("wait", "slot", "deferral", "work", "decode", "eviction", "copy")


def row(name: str, reason: str = "", **terms: float) -> dict[str, Any]:
    """Return an endpoint of a page with these terms of the cost, in milliseconds."""
    seconds = {term: terms.get(term, 0.0) / 1000 for term in NAMES}
    cost = sum(seconds.values())
    return {
        "endpoint": f"10.0.0.{ord(name[-1]) - 96}:8000",
        "name": f"serving/{name}",
        "eligible": True,
        "matched_tokens": 1024 if "work" not in terms else 0,
        "matched_bytes": 4000,
        "uncached_tokens": 16,
        "backlog_tokens": 0,
        "predicted_ttft_seconds": 0.0123,
        "cost_seconds": round(cost, 6),
        "terms": seconds,
        "reason": f"{reason}{', ' if reason else ''}cost {cost:.4f} s, 2 running",
    }


def unable(name: str, reason: str) -> dict[str, Any]:
    """Return an endpoint that cannot be picked, as decisions show it."""
    endpoint = f"10.0.0.{ord(name[-1]) - 96}:8000"
    return {"endpoint": endpoint, "name": f"serving/{name}", "eligible": False, "reason": reason}


def page(*rows: dict[str, Any], picked: int = 3, **more: Any) -> dict[str, Any]:
    """Return a page of ``/debug/pick``."""
    able = [one["endpoint"] for one in rows if one["eligible"]]
    return {"mode": "precise", "endpoints": list(rows), "picked": able[:picked], "full": False, **more}


def decision(*rows: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a page of ``/debug/decisions/ID``."""
    actual = {"cached_tokens": None, "ttft_seconds": None, "endpoint": None, "status": None, "ended": None}
    return {
        **page(*rows),
        "id": "request-1",
        "session": "kvist-epp-0-abcdef.1",
        "at": 1_700_000_000.25,
        "replica": "kvist-epp-0-abcdef",
        "kind": "chat",
        "model": "m",
        "outcome": "picked",
        "message": "",
        "priority": 0,
        "prompt_tokens": 1040,
        "prompt_bytes": 4100,
        "waited_seconds": 0.0,
        "candidates": len(rows),
        "not_shown": 0,
        "ineligible": 0,
        "predicted_ttft_seconds": 0.0123,
        "predicted_cached_tokens": 1024,
        "actual": actual | more.pop("actual", {}),
        **more,
    }


def test_where_a_request_would_go() -> None:
    """The endpoint and those for retries, the prediction, the table with the terms that matter, the
    runner-up and what decided."""
    shown = would_go(
        page(row("a", decode=10), row("b", wait=2, work=130, copy=5), unable("c", "not ready")), 120
    )

    assert shown == [
        "would go to a (10.0.0.1:8000); if it fails, to b",
        "precise: 1,024 of 1,040 prompt tokens cached there; first token after 0.012 s",
        "",
        "cost of each endpoint by its terms, in milliseconds:",
        "#  endpoint  address        cached  uncached  backlog  wait   work  decode  copy   cost",
        "1  a         10.0.0.1:8000   1,024        16        0   0.0    0.0    10.0   0.0   10.0  picked",
        "2  b         10.0.0.2:8000       0        16        0   2.0  130.0     0.0   5.0  137.0  runner-up",
        "-  c         not ready",
        "",
        (
            "the runner-up, b, would have cost 0.127 s more: work 0.130 s; the other terms speak for it by "
            "0.010 s"
        ),
    ]


def test_why_a_request_went_where_it_did() -> None:
    """The output has the request, the wait, predicted against true, the server, and what was left out."""
    actual = {"cached_tokens": 1008, "ttft_seconds": 0.5, "endpoint": "10.0.0.2:8000"}
    actual |= {"status": 200, "ended": "access-log"}
    rows = row("a", decode=10), row("b", decode=10.1), unable("c", "not ready")
    shown = went(
        decision(
            *rows,
            actual=actual,
            waited_seconds=1.25,
            candidates=100,
            not_shown=98,
            ineligible=4,
            earlier=[{}],
        ),
        100,
    )

    assert shown[:8] == [
        "request request-1, session kvist-epp-0-abcdef.1",
        "2023-11-14 22:13:20.250 UTC, replica kvist-epp-0-abcdef",
        "chat, model m, priority 0: 1,040 prompt tokens (4,100 bytes), precise",
        "waited 1.250 s",
        "went to a (10.0.0.1:8000); if it fails, to b",
        "cached tokens: 1,024 predicted, 1,008 true",
        "first token:   0.012 s predicted, 0.500 s observed (wait included)",
        "served by b (10.0.0.2:8000) instead; ended, status 200 (access-log)",
    ]
    assert shown[-6:] == [
        "98 more of 100 that were considered are not shown",
        "3 more could not be picked",
        "",
        ("the runner-up, b, would have cost the same: ties go to the fewest running requests, then in turn"),
        "",
        "this id was used 2 times; this is the last one (-o json has the others)",
    ]


def test_what_is_not_known_is_said() -> None:
    """A request under way has no true figures yet, and one that was rejected no endpoints."""
    shown = went(decision(row("a")), 100)
    rejected = went(decision(outcome="rejected-no-endpoints", message="no endpoints are known"), 100)

    assert shown[5:8] == [
        "cached tokens: 1,024 predicted, true figure not known",
        "first token:   0.012 s predicted, not observed",
        "not served yet, as far as known; has not ended",
    ]
    assert shown[-1] == "no other endpoint could be picked"
    assert rejected[-1] == "rejected (rejected-no-endpoints): no endpoints are known"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (row("b", "full", decode=1), "would have cost 0.009 s less, but it is full"),
        (row("b", decode=9), "would have cost 0.001 s less, but more requests run there"),
        (row("b", decode=10.2), "would have cost the same"),
        (row("b", decode=5, wait=30, work=20), "would have cost 0.045 s more: wait 0.030 s, work 0.020 s;"),
    ],
)
def test_what_decided_is_said_in_words(other: dict[str, Any], words: str) -> None:
    """A full runner-up, a tie, the terms that weigh most."""
    assert f"the runner-up, b, {words}" in verdict([row("a", decode=10), other])[0]


def test_the_endpoint_with_the_most_cached_is_compared_too() -> None:
    """Users ask first why a request did not go where its prompt is cached."""
    cold = [row(name, work=100) for name in "ab"]
    shown = verdict([*cold, row("c", wait=900)])

    assert shown[1] == (
        "c, which has 1,024 tokens cached, would have cost 0.800 s more: wait 0.900 s; the other terms speak "
        "for it by 0.100 s"
    )
    assert len(verdict([row("a", wait=1), row("b", wait=2), row("c", wait=9)])) == 1


@given(
    width=st.integers(80, 160),
    names=st.lists(st.text("abcdefghij-0123456789", min_size=1, max_size=63), min_size=1, max_size=6),
    data=st.data(),
)
def test_the_table_fits_the_terminal(width: int, names: list[str], data: st.DataObject) -> None:
    """Whatever the names are: of the usual terms every line fits 80 columns and more, and all lines are
    aligned."""
    few = data.draw(st.lists(st.sampled_from(NAMES), max_size=5, unique=True))
    seconds = st.floats(0, 900)
    rows = [
        row("a", "", **{term: data.draw(seconds) for term in few})
        | {"name": f"ns/{name}", "endpoint": f"{n}:1"}
        for n, name in enumerate(names)
    ]
    lines = table(rows, ["0:1"], width)

    assert max(map(len, lines[1:])) <= width
    assert len({line.index("cost") for line in lines[1:2]}) == 1


def test_requests_and_files_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither or both is a usage error, like a file that is not there."""
    file = tmp_path / "request.json"
    codes = [
        main(["explain"]),
        main(["explain", "request-1", "-f", str(file)]),
        main(["explain", "-f", str(file)]),
    ]

    assert codes == [2, 2, 2]
    lines = capsys.readouterr().err.splitlines()
    assert (
        lines[:2]
        == [
            (
                "kvist explain: name a request by its id, or a file with one by -f, but not both; "
                "kvist explain --help has examples"
            )
        ]
        * 2
    )
    assert lines[2:] == [f"kvist: -f {file}: No such file or directory"]


@pytest.mark.parametrize("words", [("--header", "x"), ("--header", "a b=c"), ("-o", "yaml")])
def test_options_that_are_none_are_refused(words: tuple[str, ...]) -> None:
    """The parser exits with 2."""
    with pytest.raises(SystemExit) as ended:
        main(["explain", "-f", "x", *words])

    assert ended.value.code == 2


def test_a_body_is_read_from_stdin(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``-f -`` reads stdin; a picker that is not there is one line and exit code 1."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps({}).encode())))

    assert main(["explain", "-f", "-", "--address", "127.0.0.1:1"]) == 1
    assert capsys.readouterr().err.startswith("kvist: --address http://127.0.0.1:1: no picker answers")
