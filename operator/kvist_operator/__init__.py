"""The operator: turns an InferencePool into tuned vLLM Deployments, an endpoint picker and the route to them.

A pool passes ``spec`` → ``models`` → ``memory`` → ``plan`` → ``manifests`` → ``apply`` → ``status``. All of
that is pure, except that ``models.source`` reads folders and asks the hub. ``cluster``, ``reconcile`` and
``process`` do the rest. The operator knows the picker's settings, names and errors, and nothing else of the
picker.

- ``spec``: reads the custom resource into a frozen ``Pool``.
- ``models``: turns a model's ``config.json`` into a ``ModelShape``.
- ``hardware``: the table of accelerators; turns a product name into an ``Accelerator``.
- ``node_labels``: the accelerators of a node by its labels.
- ``prices``: prices of accelerators for an hour.
- ``memory``: bytes that a model needs on an accelerator at a given parallelism, counted as vLLM does.
- ``plan``: chooses, with a reason for each choice.
- ``engine_flags``: spells vLLM's flags, and says which of them belong to the plan; no other module does.
- ``engine_version``: the vLLM of an image, and the known version whose flags it gets.
- ``flag_table``: every flag of vLLM by version, as its own parser declares it.
- ``flag_values``: values of flags that vLLM's parser refuses.
- ``extra_args``: reads and checks the flags that users add.
- ``json_digest``: a short hash of facts.
- ``manifests``: turns a plan into objects.
- ``apply``: compares desired with observed objects and decides on the steps.
- ``status``: what the user reads: status and conditions.
- ``cluster``: the API server, and what is known of the cluster.
- ``reconcile``: reconciles one pool.
- ``process``: the operator as a process.
- ``errors``: all exceptions.
"""
