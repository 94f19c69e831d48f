"""``kvist bench index``: speed and memory of the prefix index.

- ``answers``: ingestion of blocks that engines compute in decode, one by one.
- ``command``: runs the parts and prints the table.
- ``data``: random blocks and chains of blocks.
- ``memory``: process that fills one index and reports its resident memory.
- ``publisher``: process that publishes KV events, and a client that asks during ingestion.
- ``zmq_ingest``: ingestion through ZMQ sockets, as in the picker.
- ``pick``: CPU of one pick when many endpoints hold a long prompt.
"""
