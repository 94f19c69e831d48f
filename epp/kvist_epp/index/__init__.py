"""The index: which endpoint caches which prefix, by bytes. Pure; every clock is a parameter.

A prompt is matched as bytes in a tree of blocks that engines announced; nothing is tokenised per request. An
endpoint whose events cannot be trusted is matched in the routing history instead.

Example: engine A announces the blocks ``"You are a "``, ``"helpful as"`` and ``"sistant."``, engine B only
the first two. The tree has one chain of three blocks; A holds a run of three of them, B a run of two. A
prompt ``"You are a helpful assistant. Hi"`` is compared with the chain once, and the answer is: all three
blocks on A, two on B.

- ``lookup``: how much of a prompt each endpoint has cached, from the index or the routing history.
- ``alike_endpoints``: the many endpoints that hold the same of a prompt, taken from a bit set at once.
- ``cached_part``: the cached part of a prompt on one endpoint, and what changes it.
- ``byte_index``: the index, the interface to the byte tree.
- ``media_marks``: marks of media in the bytes of blocks and prompts.
- ``tree``: the parts of the byte tree.
- ``snapshot``: a publisher's part of the index as plain data, and back.
- ``routing_history``: prompts by the endpoint they were sent to.
- ``index_accuracy``: predicted against true cached tokens of each endpoint.
- ``last_block``: whether an engine computes the last block of each hit again.
- ``tier_accuracy``: tokens predicted to be loaded from slower tiers against those that were.
- ``storage_trust``: whether an endpoint shares the storage that its label names.
"""
