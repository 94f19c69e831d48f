"""What the documents say is so."""

from pathlib import Path

import yaml

from kvist_epp.admin.metrics import Metrics
from tests import docs

DOCS = Path(__file__).parent.parent / "docs"


def test_the_envoy_guide_has_the_configuration_that_is_tested() -> None:
    """docs/guides/envoy.yaml is what kvist_sim.envoy writes, which the data-plane suite runs."""
    assert yaml.safe_load(docs.ENVOY.read_text()) == docs.envoy()


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
