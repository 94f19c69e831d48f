"""The endpoints file: every field and every error."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvist_epp.endpoints.endpoint import Endpoint, EndpointSet
from kvist_epp.endpoints.endpoints_file import FIELDS, parse_endpoints
from kvist_epp.errors import EndpointsFileError

FULL = b"""
endpoints:
- name: a
  namespace: prod
  address: 10.0.0.1
  port: 8000
  labels: {kvist.dev/max-num-seqs: "64"}
  kvEvents: tcp://10.0.0.1:7000
  kvReplay: tcp://10.0.0.1:7100
  dataParallelRanks: 2
- {name: b, address: "fd00::0:2", port: 8001}
- {name: c, address: 10.0.0.3, port: 8000, kvEvents: none}
- {name: d, address: 10.0.0.4, port: 8000, kvReplay: none}
"""


def test_every_field_and_every_default() -> None:
    """All fields are read; absent event addresses are the engine's standard ports."""
    assert parse_endpoints(FULL) == EndpointSet(
        (
            Endpoint(
                "a",
                "prod",
                "10.0.0.1",
                8000,
                {"kvist.dev/max-num-seqs": "64"},
                "tcp://10.0.0.1:7000",
                "tcp://10.0.0.1:7100",
                2,
            ),
            Endpoint("b", "default", "fd00::2", 8001, {}, "tcp://[fd00::2]:5557", "tcp://[fd00::2]:5657"),
            Endpoint("c", "default", "10.0.0.3", 8000),
            Endpoint("d", "default", "10.0.0.4", 8000, {}, "tcp://10.0.0.4:5557"),
        )
    )


def test_json_is_read_as_well() -> None:
    """A document in JSON gives the same endpoints as in YAML."""
    assert parse_endpoints(json.dumps(yaml.safe_load(FULL)).encode()) == parse_endpoints(FULL)


def test_an_empty_list_is_an_empty_fleet() -> None:
    """An explicit empty list is valid: the pool is scaled to zero."""
    assert parse_endpoints(b"endpoints: []") == EndpointSet()


ENTRY = "name: a, address: 10.0.0.1, port: 8000"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("- a", "must be a mapping with `endpoints`, not a list"),
        ("{}", "`endpoints` is missing"),
        ("endpoint: []", "unknown key 'endpoint' (did you mean 'endpoints'?)"),
        ("endpoints: {}", "`endpoints` must be a list, not a mapping"),
        ("endpoints: [a]", "endpoints[0]: must be a mapping, not a string"),
        ("endpoints: [{name: a, port: 1}]", "endpoints[0] (a): address: is required"),
        ("endpoints: [{address: 10.0.0.1, port: 1}]", "endpoints[0]: name: is required"),
        ("endpoints: [{name: 7, address: 10.0.0.1, port: 1}]", "name: must be a string, not a number"),
        ("endpoints: [{name: a/b, address: 10.0.0.1, port: 1}]", "name: 'a/b' is not a name"),
        ("endpoints: [{name: a, address: vllm-0, port: 1}]", "address: 'vllm-0' is not an IPv4 or IPv6"),
        ("endpoints: [{name: a, address: 10.0.0.1, port: 70000}]", "port: must be 1 to 65535, not 70000"),
        ("endpoints: [{name: a, address: 10.0.0.1, port: '80x'}]", "port: must be a whole number, not a str"),
        ("endpoints: [{name: a, address: 10.0.0.1, port: true}]", "port: must be a whole number, not a bool"),
        (f"endpoints: [{{{ENTRY}, kv_events: x}}]", "unknown key 'kv_events' (did you mean 'kvEvents'?)"),
        (f"endpoints: [{{{ENTRY}, kvEvents: 'tcp://*:5557'}}]", "kvEvents: 'tcp://*:5557' is not tcp://"),
        (f"endpoints: [{{{ENTRY}, kvReplay: 5657}}]", "kvReplay: must be a string, not a number"),
        (f"endpoints: [{{{ENTRY}, dataParallelRanks: 0}}]", "dataParallelRanks: must be 1 to 1024, not 0"),
        (f"endpoints: [{{{ENTRY}, labels: [x]}}]", "labels: must be a mapping of strings, not a list"),
        (f"endpoints: [{{{ENTRY}, labels: {{n: 64}}}}]", "labels: 'n' must be a string with a string"),
        (f"endpoints: [{{{ENTRY}, name: b}}]", "not YAML at line 1, column 54: key 'name' is written twice"),
        ('{"endpoints": [], "endpoints": []}', "key 'endpoints' is written twice"),
        (
            f"endpoints: [{{{ENTRY}}}, {{name: a, address: 10.0.0.2, port: 1}}]",
            "default/a: name: is used twice",
        ),
        (
            f"endpoints: [{{{ENTRY}}}, {{name: b, address: 10.0.0.1, port: 8000}}]",
            "is already the address of default/a",
        ),
        ("x: &x {a: 1}\nendpoints: [{<<: *x}]", "merge keys are not supported"),
        ("endpoints: [", "is not YAML at line 1"),
        ("endpoints: !!int ''", "is not YAML"),
        ("endpoints: !!timestamp x", "is not YAML"),
        ("[" * 5000, "nested too deeply"),
        ('{"a":' * 50000, "nested too deeply"),
    ],
)
def test_refusals_name_the_entry_and_the_field(text: str, message: str) -> None:
    """Each error names its place and what is expected."""
    with pytest.raises(EndpointsFileError) as caught:
        parse_endpoints(text.encode())

    assert message in str(caught.value)


def test_several_problems_are_reported_at_once() -> None:
    """The first five errors are shown and the others counted, so that one edit can correct them all."""
    with pytest.raises(EndpointsFileError, match=r"endpoints\[4\].*; and 2 more$"):
        parse_endpoints(b"endpoints: [1, 2, 3, 4, 5, 6, 7]")


def test_bytes_that_are_no_text() -> None:
    """A file in another encoding is rejected with the position."""
    with pytest.raises(EndpointsFileError, match="not UTF-8 at byte 1"):
        parse_endpoints(b"a\xff")


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.dates()
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(scalars, inner, max_size=3)
)
entries = st.dictionaries(st.sampled_from([*FIELDS, "x"]), values | st.just("10.0.0.1"), max_size=8)
documents = values | st.fixed_dictionaries({"endpoints": st.lists(entries | values, max_size=3)})


def accepted(text: bytes) -> bool:
    try:
        fleet = parse_endpoints(text)
    except EndpointsFileError:
        return False
    return isinstance(fleet, EndpointSet)


@given(documents)
def test_any_yaml_is_a_fleet_or_a_refusal(document: object) -> None:
    """Any YAML gives endpoints or an EndpointsFileError, never another exception."""
    assert accepted(yaml.safe_dump(document).encode()) in (True, False)


@given(st.text(alphabet="{}[]:,-!&*<>|'\"#%@`abc019 \n\t\0é\ud7ff", max_size=60) | st.binary(max_size=60))
def test_any_bytes_are_a_fleet_or_a_refusal(text: str | bytes) -> None:
    """Any bytes give endpoints or an EndpointsFileError, never another exception."""
    assert accepted(text.encode() if isinstance(text, str) else text) in (True, False)


@given(
    st.sampled_from(["int", "float", "bool", "timestamp", "binary", "set", "omap", "pairs", "null"]),
    st.text(max_size=8),
)
def test_lying_tags_are_refused(tag: str, text: str) -> None:
    """A scalar that does not fit its tag raises an EndpointsFileError."""
    assert accepted(f"endpoints: !!{tag} {json.dumps(text)}".encode()) in (True, False)
