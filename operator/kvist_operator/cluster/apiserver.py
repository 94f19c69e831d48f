"""The real ``Cluster``: server-side apply, foreground deletion, status as a whole.

Everything that is written can be written again with the same end, so what gets no answer is tried again.
"""

import asyncio
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvist_kube.connection import JSON, Connection, LoadConfiguration, Query
from kvist_kube.errors import ApiError
from kvist_operator.errors import ClusterError, Conflict, NotServed, Unavailable
from kvist_operator.manifests.names import MANAGER

from .failures import UNAUTHORIZED, failure, pause
from .kinds import Kind, Target, target_of
from .port import Hook, Json, Moment, Write
from .rights import Right
from .starting import review

PAGE: Final = 500
ANSWER_SECONDS: Final = 30.0
APPLY: Final = "application/apply-patch+yaml"
JSON_PATCH: Final = "application/json-patch+json"
MERGE_PATCH: Final = "application/merge-patch+json"
BARE: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
REVIEW: Final = Kind(
    "authorization.k8s.io", "v1", "SelfSubjectAccessReview", "selfsubjectaccessreviews", namespaced=False
)
_GONE: Final = 410


async def _unhooked(_moment: Moment, _write: Write) -> None:
    """The hook where nobody listens."""


@dataclass(frozen=True, slots=True)
class _Request:
    """One request, and what it is for."""

    verb: str
    """As RBAC has it."""
    kind: Kind
    method: str
    path: str
    query: Query = ()
    body: Any = None
    form: str = JSON
    accept: str = JSON

    def __str__(self) -> str:
        return f"{self.verb} {self.path}"


class ApiServer:
    """A ``Cluster``. ``hook`` is called before and after each write."""

    def __init__(self, load: LoadConfiguration, *, hook: Hook = _unhooked) -> None:
        self.connection = Connection(load, answer_seconds=ANSWER_SECONDS)
        self._hook = hook

    async def close(self) -> None:
        """Close all connections."""
        await self.connection.close()

    async def get(self, target: Target) -> Json | None:
        """See ``Cluster``."""
        try:
            return _slim(await self._answer(_Request("get", target.kind, "GET", target.path)))
        except NotServed:
            return None

    async def find(
        self, kind: Kind, namespace: str = "", *, labels: str = "", bare: bool = False
    ) -> list[Json]:
        """See ``Cluster``."""
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
                found, token = [], ""  # too slow for its pages: from the start
                continue
            found += [_typed(kind, each) for each in page.get("items") or ()]
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return found

    async def served(self, kinds: Iterable[Kind]) -> frozenset[Kind]:
        """See ``Cluster``."""
        by_root: dict[str, list[Kind]] = {}
        for kind in kinds:
            by_root.setdefault(kind.root, []).append(kind)
        found = [await self._served(root, of) for root, of in by_root.items()]
        return frozenset(kind for part in found for kind in part)

    async def _served(self, root: str, kinds: Sequence[Kind]) -> Sequence[Kind]:
        try:
            page = await self._answer(_Request("get", kinds[0], "GET", root))
        except NotServed:
            return []
        names = {each.get("name") for each in page.get("resources") or ()}
        return [kind for kind in kinds if kind.plural in names]

    async def apply(self, made: Json) -> Json:
        """See ``Cluster``."""
        target = target_of(made)
        query = [("fieldManager", MANAGER), ("force", "true"), ("fieldValidation", "Strict")]
        request = _Request("patch", target.kind, "PATCH", target.path, query, made, APPLY)
        return _slim(await self._written("apply", target, request))

    async def delete(self, target: Target, uid: str) -> None:
        """See ``Cluster``."""
        body = {"propagationPolicy": "Foreground", "preconditions": {"uid": uid}}
        request = _Request("delete", target.kind, "DELETE", target.path, body=body)
        try:
            await self._written("delete", target, request)
        except (NotServed, Conflict):
            return  # gone, or another one is there already

    async def patch_status(self, found: Json, status: Json) -> Json:
        """See ``Cluster``."""
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
        """See ``Cluster``."""
        body = {"metadata": {"annotations": dict(annotations)}}
        query = [("fieldManager", MANAGER)]
        request = _Request("patch", target.kind, "PATCH", target.path, query, body, MERGE_PATCH)
        try:
            await self._written("annotate", target, request)
        except NotServed:
            return

    async def may(self, right: Right, namespace: str) -> bool:
        """Whether we have a right, in a namespace or, with an empty one, everywhere. Raises ClusterError."""
        request = _Request("create", REVIEW, "POST", REVIEW.path(), body=review(right, namespace))
        return bool((await self._answer(request)).get("status", {}).get("allowed"))

    async def _written(self, verb: str, target: Target, request: _Request) -> Json:
        write = Write(verb, target)
        await self._hook(Moment.BEFORE, write)
        answer = await self._answer(request)
        await self._hook(Moment.AFTER, write)
        return answer

    async def _answer(self, request: _Request) -> Json:
        """Of as many attempts as it takes. Raises ClusterError."""
        attempt = 0
        while True:
            attempt += 1
            try:
                return await self._once(request)
            except ClusterError as error:
                if error.status == UNAUTHORIZED and attempt == 1:
                    continue  # with the credentials as they are by now
                wait = pause(error, attempt, random.random)
                if wait is None:
                    raise
            await asyncio.sleep(wait)

    async def _once(self, request: _Request) -> Json:
        of = request
        try:
            answer = await self.connection.request(
                of.method, of.path, of.query, of.body, content_type=of.form, accept=of.accept
            )
        except ApiError as error:
            raise Unavailable(f"the API server: {error}") from error
        if not 200 <= answer.status < 300:
            raise failure(answer, doing=str(of), kind=of.kind, verb=of.verb)
        try:
            found: Json = json.loads(answer.body)
        except ValueError as error:
            raise Unavailable(f"the API server's answer is not JSON: {answer.body[:80]!r}") from error
        return found


def _typed(kind: Kind, item: Json) -> Json:
    """Items of a list say neither kind nor version, or those of what is left of them."""
    return _slim({**item, "apiVersion": kind.api_version, "kind": kind.kind})


def _slim(found: Json) -> Json:
    """Without ``managedFields``, which are half of an object and nobody's concern here."""
    found.get("metadata", {}).pop("managedFields", None)
    return found
