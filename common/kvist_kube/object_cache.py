"""Objects of one resource, as the last list and the watch after it describe them. Pure.

The rules are those of the Kubernetes API: a list is the truth at its resource version; a watch from there
sends every change in order; a bookmark only advances the version; ``410 Gone`` means that the version is too
old and the objects have to be listed again.

Objects are decoded straight into structs of the few fields that are read, so a pod costs microseconds
whatever else it carries.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import msgspec


class ObjectMeta(msgspec.Struct, frozen=True, rename="camel"):
    """``metadata`` of any object."""

    name: str
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None
    creation_timestamp: str | None = None
    """RFC 3339 in UTC, so that text sorts as time does."""
    deletion_timestamp: str | None = None


class KubeObject(msgspec.Struct, frozen=True):
    """Fields that every object has; the base of the structs that say what else is read."""

    metadata: ObjectMeta


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    """``metadata`` of a list."""

    resource_version: str
    continue_: str = msgspec.field(name="continue", default="")


class ListPage(msgspec.Struct, frozen=True):
    """One page of a list. Its items are decoded one by one, so that an unreadable one spoils no other."""

    metadata: ListMeta
    items: list[msgspec.Raw] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class Failure(msgspec.Struct, frozen=True):
    """The API's ``Status`` object: why a request was refused, or a watch ended."""

    code: int = 0
    reason: str = ""
    message: str = ""


class WatchStatus(NamedTuple):
    """State of the watch of one resource, for metrics."""

    resource: str
    open: bool
    """Whether a watch is open at present."""
    silent_seconds: float | None
    """Seconds since the API server last sent something; None when it never did."""
    lists: int
    errors: Mapping[str, int]
    """Failures by HTTP status; ``connection`` where there was no answer."""


T = TypeVar("T")
ObjectT = TypeVar("ObjectT", bound=KubeObject)


def decode(data: bytes | msgspec.Raw, kind: type[T]) -> T:
    """Decode JSON into a struct. Raises ``ValueError`` that says what does not fit."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(f"not a {kind.__name__}: {error}") from None
    except RecursionError:
        raise ValueError(f"not a {kind.__name__}: nested too deeply") from None


class _Head(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _WithHead(msgspec.Struct, frozen=True):
    """Any object, and a bookmark, which has no name."""

    metadata: _Head


@dataclass(slots=True)
class ObjectCache(Generic[ObjectT]):
    """Objects of one resource in one namespace. An unchanged object stays the same Python object."""

    kind: type[ObjectT]
    objects: dict[str, ObjectT] = field(default_factory=dict)
    """Objects by name."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Why an object could not be decoded, by name; its last readable state stays in ``objects``."""
    version: str = ""
    """Resource version to watch from; empty when a list is due."""
    changes: int = 0
    """Number of complete lists and events."""
    bookmarks: int = 0

    def replace(self, pages: list[ListPage]) -> None:
        """Replace all objects by those of a complete list.

        Raises ``ValueError``, and changes nothing, when an item is not an object at all.
        """
        objects: dict[str, ObjectT] = {}
        unreadable: dict[str, str] = {}
        for page in pages:
            for raw in page.items or ():
                self._put(raw, objects, unreadable)
        self.objects, self.unreadable = objects, unreadable
        self.version = pages[-1].metadata.resource_version
        self.changes += 1

    def on_line(self, line: bytes) -> Failure | None:
        """Apply one line of a watch; return the failure that ends the watch, if the line is one.

        Raises ``ValueError`` when the line is not an event.
        """
        event = decode(line, WatchEvent)
        if event.type == "ERROR":
            return decode(event.object, Failure)
        head = decode(event.object, _WithHead).metadata
        if event.type == "BOOKMARK":
            self.bookmarks += 1
        elif event.type == "DELETED":
            self.objects.pop(head.name, None)
            self.unreadable.pop(head.name, None)
            self.changes += 1
        else:  # ADDED, MODIFIED
            self._put(event.object, self.objects, self.unreadable)
            self.changes += 1
        self.version = head.resource_version or self.version
        return None

    def _put(self, raw: msgspec.Raw, objects: dict[str, ObjectT], unreadable: dict[str, str]) -> None:
        """Add an object; where it cannot be decoded, keep its last readable state."""
        try:
            found = decode(raw, self.kind)
        except ValueError as error:
            name = decode(raw, _WithHead).metadata.name
            unreadable[name] = str(error)
            if name in self.objects:
                objects[name] = self.objects[name]
        else:
            name = found.metadata.name
            old = self.objects.get(name)
            objects[name] = old if old is not None and old == found else found
            unreadable.pop(name, None)
