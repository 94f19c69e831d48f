"""What the documents say is so."""

from pathlib import Path

import yaml

from kvist_epp.admin.metrics import Metrics
from kvist_sim.envoy import Gateway, config

DOCS = Path(__file__).parent.parent / "docs"


def test_the_envoy_guide_has_the_configuration_that_is_tested() -> None:
    """docs/guides/envoy.yaml is what kvist_sim.envoy writes, which the data-plane suite runs."""
    gateway = Gateway(endpoints=["10.0.0.1:8000", "10.0.0.2:8000"], picker="127.0.0.1:9002", port=8080)
    assert yaml.safe_load((DOCS / "guides" / "envoy.yaml").read_text()) == config(gateway)


def test_the_metrics_guide_names_real_metrics() -> None:
    """Every kvist_epp_ name in the guide is one that the picker exports."""
    page, _ = Metrics(version="x").snapshot().write("")
    exported = {
        line.split()[2] for line in page.decode().splitlines() if line.startswith("# TYPE kvist_epp_")
    }
    words = (
        (DOCS / "guides" / "metrics.md")
        .read_text()
        .replace("`", " ")
        .replace("(", " ")
        .replace("{", " ")
        .split()
    )
    named = {word for word in words if word.startswith("kvist_epp_")}
    assert named - exported == set()
