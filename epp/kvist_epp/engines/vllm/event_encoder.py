"""Encode KV event messages as vLLM would send them: for simulated engines, benchmarks and tests. Pure."""

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import msgspec

from kvist_epp.engines.vllm.extra_keys import write_extra_keys
from kvist_epp.engines.vllm.kv_events import (
    SHARED,
    STORAGE,
    Batch,
    ClearedArray,
    ClearedMap,
    Event,
    Removed,
    RemovedArray,
    RemovedMap,
    Stored,
)

Form: TypeAlias = Literal["map", "array"]
_encode = msgspec.msgpack.Encoder().encode


def encode(batch: Batch, form: Form = "map") -> bytes:
    """Return the message an engine would send: ``map`` as vLLM from 0.26 on, ``array`` as before."""
    return _encode([batch.ts, [_wire(form, event) for event in batch.events], batch.rank])


def _wire(form: Form, event: Event) -> Any:
    mapped = form == "map"
    if isinstance(event, Stored):
        return _wire_stored(event, mapped=mapped)
    if isinstance(event, Removed):
        removed: Callable[..., Any] = RemovedMap if mapped else RemovedArray
        return removed(event.hashes, *_wire_medium(event.medium, event.group))
    return ClearedMap() if mapped else ClearedArray()


def _wire_medium(medium: str, group: int | None) -> tuple[str, int | None, str | None]:
    """Return medium, group and locality, as a removal has them."""
    return (STORAGE, group, "REMOTE") if medium == SHARED else (medium, group, None)


def _wire_stored(event: Stored, *, mapped: bool) -> dict[str, Any] | list[Any]:
    medium, _, locality = _wire_medium(event.medium, event.group)
    always = {
        "block_hashes": event.hashes,
        "parent_block_hash": event.parent,
        "token_ids": event.token_ids,
        "block_size": event.block_size,
        "lora_id": None if event.lora is None else 1,
        "medium": medium,
        "lora_name": event.lora,
    }
    optional = {
        "extra_keys": write_extra_keys(
            len(event.hashes), event.lora, event.salt, event.opaque_from, event.media, event.block_size
        ),
        "group_idx": event.group,
        "kv_cache_spec_kind": event.kind,
        "kv_cache_spec_sliding_window": event.window,
        "locality": locality,
        "ownership": None,
        "session_id": event.session,
    }
    if mapped:
        given = {key: value for key, value in optional.items() if value is not None}
        return {"type": "BlockStored", **always, **given}
    return ["BlockStored", *always.values(), *optional.values()]
