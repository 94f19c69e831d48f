"""Facts of a model that decide its memory, read from config.json. All modules but ``source`` and
``catalogue`` are pure.

- ``source``: the facts of a pool's model from the spec, a folder, the catalogue or the hub; reads files.
- ``pooling``: what config.json and the files of sentence-transformers say of pooling models.
- ``class_defaults``: defaults of transformers for keys that config.json leaves out; reads its own table.
- ``catalogue``: current models by repository, for clusters without the hub; reads a file of the package.
- ``shape``: the records ``ModelShape`` and ``Facts``; reads a whole config.json and counts weights.
- ``layers``: the records of one decoder layer and of a vision tower, and their weights.
- ``decoder``: reads which mixer and feed-forward block each decoder layer has.
- ``quantization``: reads how the weights of a checkpoint are stored.
- ``config_json``: typed access to the keys of config.json; reads the vision tower.
"""
