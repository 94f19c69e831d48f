"""The tiers that an engine may load a request's KV blocks from, as a member of the request's body.

Source: ``kv_transfer_params.kv_load_tiers`` of vLLM 0.32
(``distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py``, ``_parse_tier_filter``): a list of
matchers, none for no tier at all. Engines without an offloading connector ignore it.
"""

from collections.abc import Collection
from typing import Final

from kvist_epp.engines.vllm.kv_events import CPU, SHARED, STORAGE
from kvist_epp.extproc.rewrite import json_object

_NAME: Final = b"kv_transfer_params"
_MATCHERS: Final = (
    (frozenset({CPU}), b'{"medium":"CPU"}'),
    (frozenset({STORAGE, SHARED}), b'{"medium":"STORAGE"}'),
)


def without_loads(body: bytes, media: Collection[str]) -> bytes | None:
    """Return a request body with which its engine loads from none of these media.

    Return ``None`` if the body is not a JSON object, or if the client has set the parameters of KV transfer
    itself.
    """
    text = json_object(body)
    if text is None or _NAME in text:
        return None
    allowed = b",".join([matcher for names, matcher in _MATCHERS if names.isdisjoint(media)])
    start = text.index(b"{") + 1
    member = b'"kv_transfer_params":{"kv_load_tiers":[' + allowed + b"]}"
    more = b"" if text[start:].lstrip()[:1] == b"}" else b","
    return text[:start] + member + more + text[start:]
