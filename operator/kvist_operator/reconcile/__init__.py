"""Reconciles one pool: from its spec and the cluster's state to writes and a status.

- ``reconciler``: one reconciliation of a pool: plan, objects, writes, status.
- ``applier``: writes the difference between desired and observed objects.
- ``certificate_secret``: the Secret and the ConfigMap with the pickers' certificate.
- ``certificate_rotation``: content of that Secret, and its renewal in two steps; pure.
- ``model_cache``: facts of models, looked up in the background.
- ``picker_client``: polls pickers for what the engines' caches have saved.
- ``cache_reports``: merges the pickers' answers; pure.
- ``pool_observer``: notifications of what becomes of a pool, for metrics; pure.
- ``work_queue``: which pool is reconciled next, and when; pure.
"""
