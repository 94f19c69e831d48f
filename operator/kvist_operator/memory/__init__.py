"""What a model costs on one GPU: weights, cache, what a step needs, and what is left. All pure.

The arithmetic is vLLM's (``v1/worker/gpu_worker.py``, ``v1/kv_cache_interface.py``): the cache gets the
memory share less weights, peak activations, CUDA graphs and what lives outside torch.
"""
