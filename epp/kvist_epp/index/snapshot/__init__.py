"""Snapshots of the index, which a starting replica takes from another one.

- ``parts``: the parts of a snapshot as plain data.
- ``capture``: records one publisher's blocks in steps, and restores them.
- ``sections``: writes and reads the sections of a snapshot, one for each publisher.
"""
