"""Endpoints: where they come from, and what their metrics say.

A ``Discovery`` publishes an ``EndpointSet`` each time endpoints change; the ``Scraper`` asks each of them for
its metrics and models.

- ``endpoint``: one endpoint, and all endpoints at one moment.
- ``discovery``: opens the source of endpoints that the flags name.
- ``endpoints_file``: reads endpoints from a file and watches it.
- ``kubernetes``: endpoints from pods, selected by labels or by an InferencePool.
- ``engine_state``: what scrapes of one engine have shown; pure.
- ``engine_key``: the API key that engines require, the one before it, and what statuses say of them.
- ``engine_session``: HTTP connections to engines.
- ``page_connection``: requests one page again and again.
- ``scraper``: asks engines for ``/metrics`` and ``/v1/models``.
"""
