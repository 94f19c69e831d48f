"""What a list and the watch after it have told: objects by name, and the version to go on from. Pure.

The rules of the Kubernetes API: a list is the truth at its resource version; a watch from there tells every
change in order; a bookmark only moves the version on; ``410 Gone`` means the version is too old and a list
is due."""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from kvist_epp.endpoints.kubernetes.objects import Event, Failure, Object, Page, decoded

T = TypeVar("T", bound=Object)


class _Head(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Headed(msgspec.Struct, frozen=True):
    """Any object, and a bookmark, which has no name."""

    metadata: _Head


@dataclass(slots=True)
class Known(Generic[T]):
    """Objects by name."""

    kind: type[T]
    objects: dict[str, T] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Why an object does not have its kind's shape; what was known of it before still counts."""

    def put(self, raw: msgspec.Raw, old: T | None) -> None:
        """One object as it is now. Raises ``ValueError`` when it is no object at all."""
        try:
            found = decoded(raw, self.kind)
        except ValueError as error:
            name = decoded(raw, _Headed).metadata.name
            self.unreadable[name] = str(error)
            if old is not None:
                self.objects[name] = old
        else:
            name = found.metadata.name
            self.objects[name] = old if old == found else found
            self.unreadable.pop(name, None)

    def drop(self, name: str) -> None:
        """It has gone."""
        self.objects.pop(name, None)
        self.unreadable.pop(name, None)


@dataclass(slots=True)
class Store(Generic[T]):
    """The objects of one resource in one namespace, by name, unchanged ones the same ones."""

    kind: type[T]
    known: Known[T] = field(init=False)
    version: str = ""
    """Where to watch from; empty: a list is due."""
    changes: int = 0
    """Complete lists and events."""
    bookmarks: int = 0

    def __post_init__(self) -> None:
        self.known = Known(self.kind)

    def replace(self, pages: list[Page]) -> None:
        """A complete list: what is not in it has gone. Raises ``ValueError``, and changes nothing, when an
        item is no object."""
        known = Known(self.kind)
        for page in pages:
            for raw in page.items or ():
                known.put(raw, self.known.objects.get(decoded(raw, _Headed).metadata.name))
        self.known = known
        self.version = pages[-1].metadata.resource_version
        self.changes += 1

    def tell(self, line: bytes) -> Failure | None:
        """One line of a watch; gives the failure that ends it, if that is what it tells.

        Raises ``ValueError`` when it is no event.
        """
        event = decoded(line, Event)
        if event.type == "ERROR":
            return decoded(event.object, Failure)
        head = decoded(event.object, _Headed).metadata
        if event.type == "BOOKMARK":
            self.bookmarks += 1
        elif event.type == "DELETED":
            self.known.drop(head.name)
            self.changes += 1
        else:  # ADDED, MODIFIED
            self.known.put(event.object, self.known.objects.get(head.name))
            self.changes += 1
        self.version = head.resource_version or self.version
        return None
