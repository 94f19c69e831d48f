"""A short hash of facts, by which a later run of the operator sees whether they have changed. Pure."""

import hashlib
import json
from typing import Any


def json_digest(facts: Any, length: int) -> str:
    """Return the first hexadecimal digits of the SHA-256 of facts as JSON, whatever the order of keys."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:length]
