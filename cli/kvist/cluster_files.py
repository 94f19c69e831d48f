"""Files about a cluster for ``kvist plan``: nodes as printed by ``kubectl get nodes``, and prices."""

import json
from typing import Any, Final

import yaml

from kvist_operator.errors import SpecError
from kvist_operator.node_labels import accelerator_labels, with_reported_count
from kvist_operator.prices import check_prices, parse_prices

from .input_files import content_of

MOST_BYTES: Final = 256 << 20
"""More than the nodes of the largest cluster."""


def read_nodes(file: str) -> list[dict[str, str]]:
    """Return the accelerator labels of each node; the file is that of ``kubectl get nodes -o json`` or
    ``yaml``, and ``-`` is stdin. Raises SpecError."""
    where = f"--nodes {file}"
    found = _read(file, where)
    items = found.get("items", [found]) if isinstance(found, dict) else found
    if not isinstance(items, list):
        items = []
    labels = [_labels(each) for each in items]
    if not any(labels):
        raise SpecError(where, "has no node with labels of accelerators: write kubectl get nodes -o json")
    return [each for each in labels if each]


def read_prices(texts: list[str], file: str) -> dict[str, float]:
    """Return the prices of ``--prices FILE`` and of ``--price NAME=PRICE``, which wins. Raises SpecError."""
    where = f"--prices {file}"
    listed = _read(file, where) if file else {}
    if not isinstance(listed, dict):
        raise SpecError(where, "is not a mapping: write a line like H100-80GB: 2.99 for each accelerator")
    return check_prices(listed, "--prices") | parse_prices(texts, "--price")


def _labels(node: Any) -> dict[str, str]:
    meta = node.get("metadata") if isinstance(node, dict) else None
    labels = meta.get("labels") if isinstance(meta, dict) else None
    if not isinstance(labels, dict):
        return {}
    read = accelerator_labels({str(name): str(value) for name, value in labels.items()})
    return with_reported_count(read, node)


def _read(file: str, where: str) -> Any:
    try:
        content = content_of(file, MOST_BYTES)
        if len(content) > MOST_BYTES:
            raise SpecError(where, "is larger than 256 MiB")
        text = content.decode("utf-8")
        return json.loads(text) if text.lstrip().startswith(("{", "[")) else yaml.safe_load(text)
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(where, f"cannot be read: {str(error) or type(error).__name__}") from error
