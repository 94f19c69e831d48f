"""A control plane of the operator's own: which optional APIs there are is part of what is tested."""

from collections.abc import Iterator

import pytest
from tests.cluster.control_plane import ControlPlane, running


@pytest.fixture(scope="session")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A running control plane, without the APIs that other tests bring."""
    with running(ControlPlane(tmp_path_factory.mktemp("operator-plane"))) as made:
        yield made
