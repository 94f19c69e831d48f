"""The operator: spec → facts → memory → plan → manifests → apply → status.

``spec`` reads the custom resource into a frozen ``Pool``. ``models`` turns a model's config.json into a
``ModelShape``, ``hardware`` a product name or node labels into an ``Accelerator``. ``memory`` says how
many bytes the two cost at a given parallelism, the way vLLM would count them. ``plan`` chooses, and gives
a reason for each choice. ``engine`` is the only place that spells vLLM's flags. ``manifests`` turns a plan
into objects, ``apply`` says what to do about those that are there, ``status`` what to tell the user.

``cluster`` is the seam to the API server and what is known of it, ``reconcile`` the loop over pools,
``process`` what runs it.

The law: everything is pure but ``models.source`` (folders and the hub) and what in those last three asks
or listens. Of the picker the operator knows settings, names, how a command line is read, the way to an
API server and how certificates are signed; nothing else.
"""
