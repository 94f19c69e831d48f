"""The bench of picks: small, but the whole of it."""

import pytest

from kvist_sim.bench.index.pick import main


def test_a_row_for_each_number_of_endpoints(capsys: pytest.CaptureFixture[str]) -> None:
    """Look-up and policy are measured apart, and every endpoint holds the prompt."""
    assert main(["--endpoints", "1", "3"]) == 0

    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[0] for row in rows] == ["1", "3"]
    assert all(int(look) > 0 and int(policy) > 0 for _, look, policy, _ in rows)
