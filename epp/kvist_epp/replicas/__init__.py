"""Replicas of one picker share their load, and a new replica copies the index of an old one.

Each replica follows every other one: over one gRPC stream it receives all requests that the other has open,
then the changes, and adds them to its own load tracker. A replica that starts also asks another one for a
snapshot of its index, which is faster than replaying the event buffers of all engines.

- ``replication``: starts and stops all of it, and connects it with the director and the load tracker.
- ``remote_load``: requests that the other replicas routed, in this replica's load tracker. Pure.
- ``load_server``: sends this replica's load to the replicas that follow it. Pure.
- ``replica_connection``: finds the other replicas, opens gRPC streams to them, follows the load of each.
- ``snapshot_transfer``: sends the index to replicas that start; copies that of another one at startup.
- ``snapshot_chunks``: encodes and decodes snapshots of the index. Pure.
- ``messages``: encodes and decodes all other messages between replicas. Pure.
- ``prompt_digests``: prompts that other replicas have just sent to an endpoint, found by digests. Pure.
- ``pb``: generated protobuf code.
"""
