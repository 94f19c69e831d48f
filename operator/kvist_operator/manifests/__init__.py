"""Plan → complete objects, as dicts. Pure.

``render`` puts together what ``engine``, ``picker``, ``gateway``, ``envoy``, ``monitoring`` and ``policy``
make. What only a cluster can tell (its APIs, claims, nodes) comes in as a ``Site``; what could not be made,
and why, goes out as notes, each of which becomes a condition.
"""

from .nouns import Api, Note, Site
from .render import Rendered, render

__all__ = ["Api", "Note", "Rendered", "Site", "render"]
