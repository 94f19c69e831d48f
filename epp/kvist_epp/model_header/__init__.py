"""The role ``model-header``: an ext_proc filter in front of the pickers that tells routes the body's model.

::

    extproc.session → labeller: the body's model → header ``x-gateway-model-name``, route chosen anew

The role knows no endpoints, no tokenizer and no cluster, keeps no state between two requests, and never
changes a body. Headers of these names that a client sends are removed, whatever its body is.

- ``labeller``: from a request to the headers that name its model; the role's metrics.
- ``filter_process``: the role as a process: ports, health, pages, drain.
"""
