"""Inference engines that the picker understands, one package for each.

- ``vllm``: codec of KV events, and parsers of the pages ``/metrics`` and ``/v1/models``.
"""
