"""A ``Cluster`` on a real API server: server-side apply, foreground deletion, status as a whole.

Each write can be repeated with the same result, so a request without an answer is sent again.
"""

import asyncio
import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kvist_kube.connection import JSON, Connection, LoadConfiguration, Query
from kvist_kube.errors import ApiError
from kvist_operator.errors import ClusterError, Conflict, NotServed, Unavailable
from kvist_operator.manifests.object_names import MANAGER

from .capabilities import review
from .cluster_api import UNAUTHORIZED, Hook, Json, Moment, Write, error_of, retry_pause
from .kinds import ObjectKind, Right, Target, target_of

PAGE: Final = 500
ANSWER_SECONDS: Final = 30.0
APPLY: Final = "application/apply-patch+yaml"
JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
BARE: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
REVIEW: Final = ObjectKind(
    "authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", namespaced=False
)
_GONE: Final = 410


@dataclass(frozen=True, slots=True)
class _Request:
    """One request, with what its error message needs."""

    verb: str
    """Verb of the RBAC rule."""
    kind: ObjectKind
    method: str
    path: str
    query: Query = ()
    body: Any = None
    content_type: str = JSON
    accept: str = JSON

    def __str__(self) -> str:
        return f"{self.verb} {self.path}"


class ApiServer:
    """A ``Cluster`` by HTTP. ``hook`` is called before and after each write."""

    def __init__(self, load: LoadConfiguration, *, hook: Hook | None = None) -> None:
        self.connection = Connection(load, answer_seconds=ANSWER_SECONDS, netrc=False)
        self._hook = hook

    async def close(self) -> None:
        """Close all connections."""
        await self.connection.close()

    async def get(self, target: Target) -> Json | None:
        """Implement ``Cluster`` by an HTTP request."""
        try:
            return _slim(await self._answer(_Request("get", target.kind, "GET", target.path)))
        except NotServed:
            return None

    async def find(
        self, kind: ObjectKind, namespace: str = "", *, labels: str = "", bare: bool = False
    ) -> list[Json]:
        """Implement ``Cluster`` by an HTTP request."""
        selected: Query = [("labelSelector", labels)] if labels else []
        found: list[Json] = []
        token = ""
        while True:
            query = [*selected, ("limit", str(PAGE)), *([("continue", token)] if token else [])]
            request = _Request(
                "list", kind, "GET", kind.path(namespace), query, accept=BARE if bare else JSON
            )
            try:
                page = await self._answer(request)
            except ClusterError as error:
                if error.status != _GONE or not token:
                    raise
                found, token = [], ""  # the pages have expired: from the start
                continue
            typed = {"apiVersion": kind.api_version, "kind": kind.kind}  # which items of lists lack
            found += [_slim({**each, **typed}) for each in page.get("items") or ()]
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return found

    async def served(self, kinds: Iterable[ObjectKind]) -> frozenset[ObjectKind]:
        """Implement ``Cluster`` by an HTTP request."""
        by_root: dict[str, list[ObjectKind]] = {}
        for kind in kinds:
            by_root.setdefault(kind.root, []).append(kind)
        found: set[ObjectKind] = set()
        for root, of_root in by_root.items():
            try:
                page = await self._answer(_Request("get", of_root[0], "GET", root))
            except NotServed:
                continue
            names = {each.get("name") for each in page.get("resources") or ()}
            found.update(kind for kind in of_root if kind.plural in names)
        return frozenset(found)

    async def apply(self, made: Json) -> Json:
        """Implement ``Cluster`` by an HTTP request."""
        target = target_of(made)
        query = [("fieldManager", MANAGER), ("force", "true"), ("fieldValidation", "Strict")]
        request = _Request("patch", target.kind, "PATCH", target.path, query, made, APPLY)
        return _slim(await self._written("apply", target, request))

    async def delete(self, target: Target, uid: str) -> None:
        """Implement ``Cluster`` by an HTTP request."""
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        request = _Request("delete", target.kind, "DELETE", target.path, body=body)
        try:
            await self._written("delete", target, request)
        except (NotServed, Conflict):
            return  # absent, or already replaced by another object

    async def create(self, made: Json) -> Json:
        """Create an object. Raises ClusterError, Conflict if there is one of this name."""
        target = target_of(made)
        path = target.kind.path(target.namespace)
        return _slim(await self._answer(_Request("create", target.kind, "POST", path, body=made)))

    async def replace(self, made: Json) -> Json:
        """Replace an object at the version in ``made``. Raises ClusterError, Conflict if it has changed."""
        target = target_of(made)
        return _slim(await self._answer(_Request("update", target.kind, "PUT", target.path, body=made)))

    async def patch_status(self, found: Json, status: Json) -> Json:
        """Implement ``Cluster`` by an HTTP request."""
        target, meta = target_of(found), found["metadata"]
        body = [
            {"op": "replace", "path": "/metadata/uid", "value": meta["uid"]},
            {"op": "replace", "path": "/metadata/resourceVersion", "value": meta["resourceVersion"]},
            {"op": "add", "path": "/status", "value": status},
        ]
        query = [("fieldManager", MANAGER)]
        path = f"{target.path}/status"
        request = _Request("patch", target.kind, "PATCH", path, query, body, JSON_PATCH)
        return _slim(await self._written("status", target, request))

    async def annotate(self, target: Target, annotations: Mapping[str, str | None]) -> None:
        """Implement ``Cluster`` by an HTTP request."""
        body = {"metadata": {"annotations": dict(annotations)}}
        query = [("fieldManager", MANAGER)]
        request = _Request("patch", target.kind, "PATCH", target.path, query, body, MERGE_PATCH)
        try:
            await self._written("annotate", target, request)
        except NotServed:
            return

    async def may(self, right: Right, namespace: str) -> bool:
        """Return whether the operator has a right; an empty namespace means all. Raises ClusterError."""
        request = _Request("create", REVIEW, "POST", REVIEW.path(), body=review(right, namespace))
        return bool((await self._answer(request)).get("status", {}).get("allowed"))

    async def _written(self, verb: str, target: Target, request: _Request) -> Json:
        write = Write(verb, target)
        if self._hook:
            await self._hook(Moment.BEFORE, write)
        answer = await self._answer(request)
        if self._hook:
            await self._hook(Moment.AFTER, write)
        return answer

    async def _answer(self, request: _Request) -> Json:
        """Send a request, again where that may help, and return the answer. Raises ClusterError."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._once(request)
            except ClusterError as error:
                if error.status == UNAUTHORIZED and attempt == 1:
                    continue  # with credentials that were loaded again
                wait = retry_pause(error, attempt, random.random)
                if wait is None:
                    raise
            await asyncio.sleep(wait)

    async def _once(self, request: _Request) -> Json:
        try:
            answer = await self.connection.request(
                request.method,
                request.path,
                request.query,
                request.body,
                content_type=request.content_type,
                accept=request.accept,
            )
        except ApiError as error:
            raise Unavailable(f"no answer from the API server: {error}") from error
        if not 200 <= answer.status < 300:
            raise error_of(answer, doing=str(request), kind=request.kind, verb=request.verb)
        try:
            found: Json = json.loads(answer.body)
        except ValueError as error:
            raise Unavailable(f"the API server's answer is not JSON: {answer.body[:80]!r}") from error
        return found


def _slim(found: Json) -> Json:
    """Remove ``managedFields``, which are half of an object and not needed."""
    found.get("metadata", {}).pop("managedFields", None)
    return found
