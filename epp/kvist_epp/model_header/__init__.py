"""The role ``model-header``: an ext_proc filter before the pickers that tells routes the body's model.

::

    wire.exchange → label (find: the body's model) → header ``x-gateway-model-name``, route chosen anew

It knows no fleet, no tokenizer and no cluster, keeps nothing between two requests, and never changes a body.
What a client sends under the headers' names goes away, whatever its body is.
"""
