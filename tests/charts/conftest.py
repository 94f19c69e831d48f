"""helm of both majors; the control plane and the cluster are those of tests/cluster."""

from pathlib import Path

import pytest
from tests.charts.helm import Helm
from tests.cluster.conftest import admin, cluster, plane, room, space

__all__ = ["admin", "cluster", "plane", "room", "space"]


@pytest.fixture(scope="session", params=[3, 4], ids=["helm3", "helm4"])
def helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """The command, without a cluster."""
    return Helm(request.param, tmp_path_factory.mktemp("helm"))


@pytest.fixture(scope="session")
def helm4(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Return helm 4, for tests that do not depend on helm's version."""
    return Helm(4, tmp_path_factory.mktemp("helm"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of one test."""
    return tmp_path
