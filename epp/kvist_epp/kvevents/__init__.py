"""KV cache events of the engines: received, put into order, and applied to the index.

Each data-parallel rank of an engine is a *publisher*, and each publisher has a ``PublisherFeed``. Its
messages pass ``io_context`` (ZMQ socket), ``publisher_feed``, ``sequencing``, the codec in ``engines.vllm``
and ``ingestion``, which is the only writer of the index. Everything runs on the event loop, in slices of a
millisecond between picks.

States of a publisher in ``sequencing.EventSequencer``; a replay is the answer of the engine's replay buffer,
which has its last batches::

                   start
                     |
        +------------+------------------+
        | another replica may           | otherwise
        | have a snapshot               |
        v                               v
    +---------+  snapshot adopted  +-----------+  restart found: forget all and request
    | WAITING |  or skipped        | REPLAYING |--+  a replay from batch 0
    |  hold   |------------------->|   hold    |<-+  long replay, or gap among the messages
    +---------+                    +-----------+     held: request a replay from there
        |                            |       ^
        | too many held:    end, or  |       |  gap, number steps back, new connection,
        | forget all, then  no       |       |  or check of an idle engine: request a
        | apply them        answer:  |       |  replay from the last batch applied on
        |                   apply    |       |
        |                   held     v       |
        |                          +-----------+
        +------------------------->| FOLLOWING |
                                   |   apply   |
                                   +-----------+

Batches of a replay are applied in their order; *hold* and *apply* say what happens to live messages. A live
message with number 0 after other messages is the first one of a restarted engine: in every state all blocks
are forgotten and the publisher is FOLLOWING. Another number that steps back ends WAITING. If a replay does
not fill a gap, what was applied before the gap is forgotten. Without a replay buffer, REPLAYING ends at once
as if there was no answer.

A publisher is not *warm* before its first replay has ended, and *suspect* while messages are missing or the
engine has restarted and no replay has settled it. The index is trusted for an endpoint only while all of its
publishers are warm and none is suspect.

- ``answer_blocks``: the short way of most events, of one more block of an answer.
- ``decode_blocks``: blocks computed in decode that are not credited, or not finally.
- ``decode_check``: check of such blocks against the tokenizer, before they are credited.
- ``evicted_blocks``: blocks that were evicted and are computed again.
- ``block_decoder``: the bytes of blocks, of which events give the token ids.
- ``ingestion``: application of events to the index, and what they reveal about requests.
- ``io_context``: ZMQ sockets on the event loop, the cooperative scheduler, and the limit on replays.
- ``lmcache_blocks``: what a server of LMCache holds, by the events of its engines.
- ``observation``: progress of a request as events reveal it, and the sessions seen in events.
- ``publisher_feed``: one publisher's way from its sockets to the index, with its replays.
- ``publisher_state``: counters of a publisher, and its events that wait for their parents.
- ``sequencing``: order of a publisher's batches: apply, hold, request a replay, or forget.
- ``subscriber``: feeds of all publishers, bind mode, and background work.
- ``tier_blocks``: place of the blocks of slower tiers in the index, whichever event comes first.
- ``tier_state``: blocks of slower tiers that wait for their place, and leases of those that no event removes.
"""
