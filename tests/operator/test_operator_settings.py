"""The operator's flags: round trip, environment, errors."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_operator.errors import OperatorSettingsError
from kvist_operator.process.settings import OperatorSettings

NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9]{0,8}", fullmatch=True), max_size=3).map(",".join)
SECONDS = st.floats(1, 1e6)


@given(
    st.builds(
        OperatorSettings,
        namespaces=NAMES,
        picker_image=st.from_regex(r"[a-z]{1,9}:[0-9]{1,3}", fullmatch=True),
        prices=st.sampled_from(["", "L4=0.7", "H100-80GB=2.99,L4=0.7"]),
        workers=st.integers(1, 99),
        resync=SECONDS,
        discovery_interval=SECONDS,
        fleet_interval=st.just(0.0) | SECONDS,
        metrics_port=st.integers(0, 65_535),
        log_format=st.sampled_from(["auto", "json", "text"]),
    )
)
def test_a_command_line_gives_the_settings_it_was_made_from(made: OperatorSettings) -> None:
    """Settings survive the round trip through a command line, since a chart writes it and the operator reads
    it."""
    assert OperatorSettings.from_args(made.to_args()) == made


def test_prices_are_read_by_name() -> None:
    """A list of prices gives numbers by the name of the accelerator; an empty one gives none."""
    assert OperatorSettings(prices="H100-80GB=2.99,L4=0.7").price_list == {"H100-80GB": 2.99, "L4": 0.7}
    assert OperatorSettings().price_list == {}


def test_an_environment_variable_stands_for_a_flag() -> None:
    """An environment variable sets a flag, and the command line takes precedence."""
    environment = {"KVIST_OPERATOR_NAMESPACES": "a,b", "KVIST_OPERATOR_WORKERS": "3"}
    found = OperatorSettings.from_args(["--workers=5"], environment)

    assert (found.watched, found.workers) == (("a", "b"), 5)


@pytest.mark.parametrize(
    ("argument", "flag"),
    [
        ("--namespaces=a,,b", "--namespaces"),
        ("--namespaces=A", "--namespaces"),
        ("--metrics-port=70000", "--metrics-port"),
        ("--workers=0", "--workers"),
        ("--prices=H100", "--prices H100"),
        ("--prices=L4=0.7,H100=free", "--prices H100"),
        ("--prices=L4=-1", "--prices L4"),
        ("--resync=0", "--resync"),
        ("--discovery-interval=nan", "--discovery-interval"),
        ("--fleet-interval=-1", "--fleet-interval"),
    ],
)
def test_what_cannot_be_is_refused_by_its_flag(
    argument: str, flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names the flag, whether it comes from the settings or from argparse."""
    with pytest.raises((OperatorSettingsError, SystemExit)) as refused:
        OperatorSettings.from_args([argument])
    assert flag in f"{refused.value} {capsys.readouterr().err}"
