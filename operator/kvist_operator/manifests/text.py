"""Objects as YAML for people: no aliases, texts of many lines as blocks. Pure."""

from collections.abc import Iterable
from typing import Any

import yaml

from .cluster_facts import Json


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


def to_yaml(objects: Iterable[Json]) -> str:
    """Documents, each begun by ``---``, in the order given."""
    return yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, width=110, allow_unicode=True, explicit_start=True
    )
