"""What the picker is asked, and what it answers."""

from collections.abc import Mapping

import msgspec

from kvist_epp.errors import PickError


class Ask(msgspec.Struct, frozen=True):
    """What the picker is asked."""

    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str]
    """Lower-case names without pseudo headers; latin-1; repeated ones joined by a comma."""
    body: bytes
    """With the model's name already rewritten, where a header asks for that."""
    subset: tuple[str, ...] | None
    """The gateway's hint: "ip" or "ip:port" each; ``None`` = no hint, empty = nothing is allowed."""
    partial: bool = False
    """The request has more body than ``body`` shows: its shape must not be judged."""


class Picked(msgspec.Struct, frozen=True):
    """Where the request goes."""

    endpoints: tuple[str, ...]
    """In order of preference, "ip:port" or "[v6]:port"; none: the choice is not made here."""
    headers: tuple[tuple[str, str], ...] = ()
    """Request headers to set besides the destination."""
    body: bytes | None = None
    """Replaces the request's body, where it was seen whole; ``content-length`` follows by itself."""
    session: str = ""
    """What the picker calls this request: told again with what is seen of its response."""
    remove: tuple[str, ...] = ()
    """Request headers to take away."""


Decision = Picked | PickError
