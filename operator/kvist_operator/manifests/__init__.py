"""Complete Kubernetes objects, as dicts, from a plan. Pure.

What only a cluster can tell (its APIs, claims, nodes) comes in as a ``Site``. What could not be made, and
why, goes out as notes, each of which becomes a condition.

- ``render``: all objects of a pool, and objects as YAML.
- ``engine_workload``: the engines' Deployment or LeaderWorkerSet.
- ``engine_roles``: the engines of a disaggregated pool by role, their labels and ports.
- ``placement``: the nodes of the engines' pods, and the devices between them.
- ``disk_tier``: the volume for KV cache blocks on disk, and its cleaner.
- ``shared_tier``: the claim for KV cache blocks of several pods, its cleaner, and what pods say of it.
- ``lmcache``: a server of LMCache on each node.
- ``weights_cache``: the shared cache for weights of the hub, and the Job that fills it.
- ``termination_log``: the file by which engines report why they died.
- ``picker``: the pickers' Deployment, Services and rights.
- ``tokenizer``: the pickers' tokenizer and chat settings.
- ``gateway``: routes and policies for a Gateway.
- ``gateway_policies``: policies of single gateways: GKE, NGINX Gateway Fabric, Envoy AI Gateway.
- ``envoy``: the pool's own Envoy.
- ``bootstrap``: the configuration of that Envoy.
- ``engine_clients``: the pods that may connect to the engines.
- ``policy``: NetworkPolicies and PodMonitors.
- ``pods``: parts of all pods, Services and budgets.
- ``overlays``: ``spec.podTemplate`` and its like, merged into the templates of pods.
- ``object_names``: names, labels, ports and annotations; the site that objects are rendered for, and notes.
"""

from .object_names import Api, Note, Site
from .render import Rendered, render

__all__ = ["Api", "Note", "Rendered", "Site", "render"]
