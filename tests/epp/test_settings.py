import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.errors import SettingsError
from kvist_epp.settings import TRANSPORTS, Settings

SETTINGS = st.builds(
    Settings,
    endpoints_file=st.text(st.characters(codec="ascii", min_codepoint=33), max_size=20),
    model=st.sampled_from(["", "./a model", "hf://org/repo@main"]),
    grpc_port=st.integers(0, 65_535),
    secure_serving=st.booleans(),
    transport=st.sampled_from(TRANSPORTS),
    scrape_interval=st.floats(0.001, 1e6),
    max_num_seqs=st.integers(1, 1 << 20),
    log_format=st.sampled_from(["auto", "json", "text"]),
    debug_text=st.booleans(),
)


@given(SETTINGS)
def test_settings_survive_the_command_line(settings: Settings) -> None:
    """Arguments rendered from settings give the same settings back."""
    assert Settings.from_args(settings.to_args()) == settings


def test_every_flag_can_come_from_the_environment() -> None:
    """Each flag is also read from KVIST_EPP_<FLAG>, and the command line wins over it."""
    environment = {
        "KVIST_EPP_GRPC_PORT": "1234",
        "KVIST_EPP_SECURE_SERVING": "false",
        "KVIST_EPP_MODEL": "/m",
    }
    settings = Settings.from_args(["--model=./other"], environment)
    assert settings == Settings(grpc_port=1234, secure_serving=False, model="./other")


def test_a_bare_boolean_flag_means_true() -> None:
    """``--debug-text`` alone turns it on, as operators of Go programs expect."""
    assert Settings.from_args(["--debug-text"]).debug_text is True


@pytest.mark.parametrize(
    ("argv", "flag"),
    [(["--grpc-port=70000"], "--grpc-port"), (["--scrape-interval=0"], "--scrape-interval")],
)
def test_a_bad_value_names_its_flag(argv: list[str], flag: str) -> None:
    """A value out of range is refused with the name of the flag."""
    with pytest.raises(SettingsError, match=flag):
        Settings.from_args(argv)


def test_a_bad_variable_names_itself() -> None:
    """A variable that cannot be read is refused by its own name."""
    with pytest.raises(SettingsError, match="KVIST_EPP_GRPC_PORT"):
        Settings.from_args([], {"KVIST_EPP_GRPC_PORT": "many"})


def test_tls_is_refused_with_the_remedy() -> None:
    """Until TLS exists the picker says that --secure-serving=false is required."""
    with pytest.raises(SettingsError, match="--secure-serving=false"):
        Settings(endpoints_file="x").check()


def test_every_setting_has_a_help_text() -> None:
    """No flag is undocumented."""
    assert [f.name for f in dataclasses.fields(Settings) if not f.metadata["help"]] == []


def test_a_flag_on_the_command_line_hides_its_variable() -> None:
    """A variable does no harm where the command line wins anyway, and an empty one is none."""
    environment = {"KVIST_EPP_GRPC_PORT": "many", "KVIST_EPP_METRICS_PORT": ""}
    assert Settings.from_args(["--grpc-port=1"], environment) == Settings(grpc_port=1)


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_times_are_numbers(text: str) -> None:
    """Neither nan nor infinity is a time."""
    with pytest.raises(SettingsError, match="--scrape-interval"):
        Settings.from_args([f"--scrape-interval={text}"])
