"""The live page of a picker, at ``/`` of the metrics port, and its document for programs.

Read only, and without prompt text but what a viewer pastes into its form.

- ``live_page``: joins the parts below; paths, headers, the form.
- ``live_state``: the document of this replica.
- ``endpoint_condition``: what is the matter with an endpoint, in a word.
- ``limits_of_knowledge``: what the page cannot know, why, and what would change that.
- ``prefill_times``: time to the end of prefill by KV events.
- ``recent_samples``: figures of the last five minutes.
- ``replica_merge``: one document of all replicas; shares and quantiles.
- ``live_feed``: snapshots once a second, and the viewers they are sent to.
- ``live_html``: the page as HTML, from the templates in ``assets/``.
- ``request_origin``: which requests are answered, by ``Host`` and ``Origin``.
- ``units``: figures as people read them.
"""
