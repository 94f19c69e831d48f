"""Memory of a model on one GPU: weights, KV cache, what a step needs, and what is left. All pure.

The arithmetic is vLLM's (``v1/worker/gpu_worker.py``, ``v1/kv_cache_interface.py``): the KV cache gets the
share of the memory that vLLM may use, less weights, peak activations, CUDA graphs and memory outside torch.

- ``layout``: parallelism of a replica and settings of an engine, on which the arithmetic depends.
- ``memory_budget``: the memory of the fullest GPU, item by item, and what is left for the KV cache.
- ``memory_profile``: what vLLM's memory profile finds besides the weights, by version.
- ``padding``: padding of 4-bit experts by the kernel that multiplies with them.
- ``kv_cache``: the KV cache as vLLM lays it out: pages, groups, blocks a request takes.
"""
