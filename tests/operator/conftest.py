"""Fixtures of the operator's tests."""

import pytest
from tests.operator.ground import Ground


@pytest.fixture
def ground() -> Ground:
    """Return a ground with a simple pool."""
    made = Ground()
    made.put()
    return made
