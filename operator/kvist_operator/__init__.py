"""The operator: spec → facts → memory → plan → manifests → apply → status.

``spec`` reads the custom resource into a frozen ``Pool``. ``models`` turns a model's config.json into a
``ModelShape``, ``hardware`` a product name or node labels into an ``Accelerator``. ``memory`` says how
many bytes the two cost at a given parallelism, the way vLLM would count them. ``plan`` chooses, and gives
a reason for each choice. ``engine`` is the only place that spells vLLM's flags. ``manifests`` turns a plan
into objects, ``apply`` says what to do about those that are there, ``status`` what to tell the user.

The law: everything here is pure, except ``models.source`` (folders and the hub). Of the picker it knows
``kvist_epp.settings`` and ``kvist_epp.names`` and nothing else.
"""
