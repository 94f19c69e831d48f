"""The guide on TLS: its commands are taken, its YAML is what the tests run."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvist_epp.settings.settings import Settings
from kvist_sim.envoy_settings import PickerTls

GUIDE = (Path(__file__).parent.parent / "docs" / "guides" / "tls.md").read_text()


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


COMMANDS = [line for block in _blocks("bash") for line in block.splitlines() if line.startswith("kvist-epp ")]


def _yaml(key: str) -> Any:
    """The one document with this key."""
    (found,) = (document for block in _blocks("yaml") if key in (document := yaml.safe_load(block)))
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_are_taken(command: str) -> None:
    """Each command line of the guide is one the picker starts with."""
    assert Settings.from_args(shlex.split(command)[1:]).check().secure_serving


def test_there_are_commands() -> None:
    """The search above finds them: self-made, own, mutual."""
    assert len(COMMANDS) == 3


def test_the_gateway_that_verifies_is_the_one_that_is_tested() -> None:
    """Envoy's TLS context is what ``kvist_sim`` writes, with which the data-plane suite verifies pickers."""
    tls = PickerTls(ca_file=Path("/etc/envoy/picker-ca.crt"), name="kvist-epp.serving.svc")
    assert _yaml("transport_socket")["transport_socket"] == tls.transport_socket()


def test_the_mounted_secret_is_the_one_that_is_issued() -> None:
    """Certificate, volume and flag of the guide name the same Secret and folder."""
    pod = _yaml("containers")
    (container,) = pod["containers"]
    settings = Settings.from_args(container["args"]).check()
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]

    assert settings.cert_path == mount["mountPath"]
    assert mount["name"] == volume["name"]
    assert volume["secret"]["secretName"] == _yaml("kind")["spec"]["secretName"]
