"""The cluster as the operator sees it: the API it uses, and what it knows of the cluster's objects.

- ``kinds``: the kinds of objects that the operator reads or writes, their API paths, and its rights; pure.
- ``cluster_api``: the operations that the operator needs of a cluster; an interface.
- ``api_errors``: meaning of the API server's failures, and pauses between attempts; pure.
- ``apiserver``: the interface on a real API server.
- ``capabilities``: optional APIs, node labels, access modes of claims, and the check at the start.
- ``pool_cache``: pools, their children and their pods, as last seen; pure.
- ``pool_informer``: fills the cache by lists, by events and by a periodic resync.
- ``kopf_watch``: watches kinds of objects by kopf.
"""
