"""Complete Kubernetes objects, as dicts, from a plan. Pure.

``render`` combines what the other modules make: ``engine_workload`` (with ``termination_log``, ``tokenizer``,
``chats`` and ``sources``), ``picker``, ``gateway``, ``envoy``, ``bootstrap``, ``monitoring`` and ``policy``.
``pods``, ``placing``, ``overlay``, ``text`` and ``object_names`` are shared by them. What only a cluster can
tell (its APIs, claims, nodes) comes in as a ``Site`` (``cluster_facts``). What could not be made, and why,
goes out as notes, each of which becomes a condition.
"""

from .cluster_facts import Api, Note, Site
from .render import Rendered, render

__all__ = ["Api", "Note", "Rendered", "Site", "render"]
