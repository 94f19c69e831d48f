"""The rules of the operator's roles: all that it needs, and no more."""

import re
from pathlib import Path
from typing import Any

import yaml
from tests.operator.manifested import CASES, rendered

from kvist_operator.cluster.capabilities import required_rights, review
from kvist_operator.cluster.kinds import (
    CHILDREN,
    POOL,
    SECRET,
    Right,
    everywhere,
    kind_of,
    namespaced,
    single_rights,
)
from kvist_operator.process.observability import Metrics

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "operator.md"


def test_every_object_of_every_pool_can_be_made_and_taken_away() -> None:
    """Each rendered kind has a rule with all verbs for apply and deletion."""
    held = set(single_rights(namespaced()))
    for case in CASES:
        for made in rendered(case).objects:
            kind = kind_of(made)
            assert kind in CHILDREN
            for verb in ("get", "list", "watch", "create", "patch", "delete"):
                assert Right(kind.group, kind.plural, verb) in held, (case, kind, verb)


def test_whatever_a_picker_may_do_the_operator_may() -> None:
    """The operator has all rights of pickers; otherwise their Roles would be refused as an escalation."""
    held = set(single_rights(namespaced()))
    roles = [made for case in CASES for made in rendered(case).objects if made["kind"] == "Role"]
    assert roles
    for role in roles:
        assert set(single_rights(role["rules"])) <= held


def test_there_is_nothing_that_lets_it_do_more() -> None:
    """There is no wildcard, no list of Secrets, no write to a pool's spec, and no pod is created."""
    found = [*single_rights(everywhere()), *single_rights(namespaced())]
    assert not any("*" in (right.group, right.resource, right.verb) for right in found)
    assert {r.verb for r in found if r.resource == "secrets"} == {"get", "create", "patch", "delete"}
    assert {r.verb for r in found if (r.group, r.resource) == (POOL.group, POOL.plural)} == {
        "get",
        "list",
        "watch",
    }
    assert {r.verb for r in found if r.resource == "pods"} == {"get", "list", "watch", "patch"}
    assert not any(r.verb in ("bind", "escalate", "impersonate", "deletecollection") for r in found)
    assert not any(r.resource in ("clusterroles", "namespaces", "customresourcedefinitions") for r in found)


def test_a_role_of_a_namespace_knows_no_nodes() -> None:
    """A namespaced Role has all rules of the ClusterRole except those for nodes and classes of gateways."""
    cluster = {each for each in single_rights(everywhere()) if each.resource in ("nodes", "gatewayclasses")}
    assert {(right.resource, right.verb) for right in cluster} == {
        ("nodes", "list"),
        ("gatewayclasses", "get"),
    }
    assert set(single_rights(namespaced())) == set(single_rights(everywhere())) - cluster


def test_a_missing_optional_api_does_not_keep_it_from_starting() -> None:
    """The rights checked at the start are those without which the operator cannot work."""
    resources = {(right.group, right.resource) for right in required_rights(True)}
    assert ("", SECRET.plural) in resources
    assert not any("gateway" in group or "monitoring" in group for group, _ in resources)


def test_a_review_asks_for_exactly_one_right() -> None:
    """A review has the subresource apart, and a namespace only where there is one."""
    made: dict[str, Any] = review(Right("kvist.dev", "inferencepools/status", "patch"), "")
    assert made["spec"]["resourceAttributes"] == {
        "group": "kvist.dev",
        "resource": "inferencepools",
        "subresource": "status",
        "verb": "patch",
    }


def test_the_guide_has_exactly_these_rules() -> None:
    """The rules in the guide are those of the code."""
    [text] = re.findall(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert yaml.safe_load(text) == everywhere()


def test_the_guide_names_every_metric() -> None:
    """The guide lists all exported metrics and no others."""
    exported = {
        line.split()[2] for line in Metrics().text().decode().splitlines() if line.startswith("# TYPE")
    }
    exported = {name for name in exported if not name.endswith("_created")}
    named = set(re.findall(r"kvist_operator_[a-z_]+", GUIDE.read_text()))
    assert named == exported | {"kvist_operator_api_requests_total"}
