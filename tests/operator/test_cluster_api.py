"""Meaning of the API server's failures."""

import json

import pytest

from kvist_kube.connection import Answer
from kvist_operator.cluster.cluster_api import ATTEMPTS, LONGEST_SECONDS, error_of, retry_pause
from kvist_operator.cluster.kinds import DEPLOYMENT
from kvist_operator.errors import (
    ClusterError,
    Conflict,
    Forbidden,
    NotServed,
    QuotaExceeded,
    Refused,
    Unavailable,
)

RIGHT = 'deployments.apps "t" is forbidden: User "o" cannot patch resource "deployments" in API group "apps"'
ESCALATES = 'roles "t" is forbidden: user "o" is attempting to grant RBAC permissions not currently held:'
QUOTA = 'deployments.apps "t" is forbidden: exceeded quota: few, requested: count/deployments.apps=1'
PODS = 'pods "t" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != false'
HOOK = 'admission webhook "policy.example.com" denied the request: no latest tags'
ENDING = 'deployments.apps "t" is forbidden: unable to create new content in namespace n which is terminated'


@pytest.mark.parametrize(
    ("status", "words", "kind"),
    [
        (400, HOOK, Refused),
        (401, "Unauthorized", Forbidden),
        (403, RIGHT, Forbidden),
        (403, ESCALATES, Forbidden),
        (403, QUOTA, QuotaExceeded),
        (403, PODS, Refused),
        (403, ENDING, Refused),
        (404, "404 page not found", NotServed),
        (409, "the object has been modified", Conflict),
        (422, 'Deployment.apps "t" is invalid: spec.replicas: Invalid value: -1', Refused),
        (429, "too many requests", Unavailable),
        (500, 'failed calling webhook "policy.example.com"', Unavailable),
        (500, "failed to create typed patch object: .spec.x: field not declared in schema", Refused),
        (503, "", Unavailable),
    ],
)
def test_each_answer_is_an_error_of_its_kind_with_the_servers_message(
    status: int, words: str, kind: type[ClusterError]
) -> None:
    """Quotas, admission and missing rights share a status; the server's message distinguishes them and is
    kept."""
    body = json.dumps({"kind": "Status", "message": words}).encode()
    found = error_of(Answer(status, body, 0.0), doing="patch x", kind=DEPLOYMENT, verb="patch")

    assert type(found) is kind
    assert str(found).startswith("patch x: ")
    assert words in str(found)
    assert found.status == status


def test_a_missing_right_is_reported_as_the_missing_rule() -> None:
    """A missing right is reported as a rule that can be pasted into a role."""
    answer = Answer(403, json.dumps({"message": RIGHT}).encode(), 0.0)
    found = error_of(answer, doing="x", kind=DEPLOYMENT, verb="patch")

    assert 'apiGroups: ["apps"], resources: ["deployments"], verbs: ["patch"]' in str(found)


@pytest.mark.parametrize("body", [b"<html>bad gateway", b"[1]", b"\xff", b"", b'{"message": 5}'])
def test_an_answer_that_is_no_status_is_no_reason_to_fall_over(body: bytes) -> None:
    """An answer that is not a Status object, for example a proxy's, is a temporary error."""
    assert isinstance(error_of(Answer(502, body, 0.0), doing="x", kind=DEPLOYMENT, verb="get"), Unavailable)


def test_only_what_may_pass_is_tried_again_and_not_for_ever() -> None:
    """Pauses double, are never shorter than asked for, and end after some attempts."""
    busy = Unavailable("x", 503)
    waits = [retry_pause(busy, attempt, lambda: 1.0) for attempt in range(1, ATTEMPTS + 1)]

    assert waits == [0.2, 0.4, 0.8, 1.6, None]
    assert retry_pause(Refused("x", 422), 1, lambda: 1.0) is None
    assert retry_pause(Unavailable("x", 429, retry_after=3.0), 1, lambda: 0.0) == 3.0
    assert retry_pause(Unavailable("x", 429, retry_after=600.0), 1, lambda: 0.0) == LONGEST_SECONDS
    asked = error_of(Answer(429, b"", 7.0), doing="x", kind=DEPLOYMENT, verb="get")
    assert asked.retry_after == 7.0
