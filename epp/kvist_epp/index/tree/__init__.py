"""The byte tree: consecutive blocks in segments, and which publishers hold them.

A node of the tree is a block; up to 64 consecutive blocks share a segment, so that a prompt is compared
thousands of bytes at a time. Nearly every publisher holds a segment from its first block on, so its holders
are bit sets by the length of that run.

- ``segment``: segments, and how children hang on the block they follow.
- ``holders``: which publishers hold which blocks of a segment; and what is kept of each publisher.
- ``forest``: all trees, the mapping of engine hashes to segments, and the changes that keep them consistent.
- ``storing``: adds a chain of blocks that an engine stored.
- ``removing``: removes blocks that an engine has evicted.
- ``matches``: the walk down the tree along a prompt.
- ``windows``: KV cache groups whose layers look back a window only, and where hits end because of them.
- ``eviction``: which blocks of a prompt an engine's host memory removes next.
"""
