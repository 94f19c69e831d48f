"""The cluster as the operator sees it: the API it uses, and what it knows of the cluster's objects.

- ``kinds``: the kinds of objects that the operator reads or writes, their API paths, and its rights; pure.
- ``cluster_api``: the operations that the operator needs of a cluster, and the meaning of their failures;
pure.
- ``apiserver``: the interface on a real API server.
- ``leader_election``: of several replicas one works, by a Lease.
- ``capabilities``: optional APIs, node labels, access modes of claims, and the check at the start.
- ``presets``: the presets that pools refer to.
- ``pool_cache``: pools, their children and their pods, as last seen, kept in step by events and resyncs.
- ``kopf_watch``: watches kinds of objects by kopf.
"""
