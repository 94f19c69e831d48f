"""Endpoints from Kubernetes: pods, pools and objectives.

``kvist_kube`` lists and watches the objects; this package says what they mean. An error never removes an
endpoint: only an answer of the API does.

- ``pod_endpoints``: pods and the endpoints they become; pure.
- ``pools``: the pods and ports that a pool selects, and the priorities that objectives set; pure.
- ``pod_discovery``: follows pool, pods and objectives, and publishes the endpoints.
"""
