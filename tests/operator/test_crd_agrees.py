"""The CRD and the reader of the spec agree on names, bounds, choices and defaults, field by field."""

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import yaml
from tests.crd.cases import CRD, cases
from tests.crd.presets import PRESETS, preset_crd
from tests.operator.golden import CASES, made

from kvist_operator.errors import SpecError
from kvist_operator.spec import Pool, read_pool
from kvist_operator.spec.preset import OF_ONE_POOL, SECTIONS
from kvist_operator.status import plan_status

Schema = Mapping[str, Any]
Path = tuple[str | int, ...]

ENV: list[dict[str, Any]] = [
    {"name": "A", "value": "a"},
    {"name": "B", "valueFrom": {"secretKeyRef": {"name": "a", "key": "a", "optional": True}}},
    {"name": "C", "valueFrom": {"configMapKeyRef": {"name": "a", "key": "a", "optional": True}}},
    {"name": "D", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
]
ROLE: dict[str, Any] = {
    "replicas": 1,
    "scaling": "Spec",
    "accelerator": {"product": "a", "memory": "1Gi", "resourceName": "a", "count": 1, "perNode": 1},
    "engine": {
        "tensorParallelSize": 1,
        "pipelineParallelSize": 1,
        "dataParallelSize": 1,
        "gpuMemoryUtilizationPercent": 90,
        "maxNumSeqs": 64,
        "maxNumBatchedTokens": 65_536,
        "extraArgs": ["--middleware=a"],
        "env": ENV,
    },
}
FULL: dict[str, Any] = {
    "model": {
        "source": "hf://acme/model",
        "task": "Generate",
        "revision": "a",
        "servedName": "a",
        "tokenSecretRef": {"name": "a", "key": "a"},
        "adapters": [{"name": "b", "source": "hf://a", "rank": 16}],
        "shape": {"config": {"a": 1}, "checkpointSize": 1},
        "cache": {"claim": "a"},
    },
    "engine": {
        "image": "a",
        "version": "0.99.0",
        "quantization": "FP8",
        "kvCacheDtype": "Auto",
        "attentionBackend": "A",
        "prefixCaching": "Enabled",
        "gpuMemoryUtilizationPercent": 90,
        "maxModelLen": 2**31 - 1,
        "maxNumSeqs": 64,
        "maxNumBatchedTokens": 65_536,
        "tensorParallelSize": 1,
        "pipelineParallelSize": 1,
        "dataParallelSize": 1,
        "decodeContextParallelSize": 1,
        "maxLoras": 1,
        "maxCpuLoras": 256,
        "speculative": {
            "method": "EAGLE3",
            "tokens": 2,
            "model": "hf://a",
            "shape": {"config": {"a": 1}, "checkpointSize": 1},
        },
        "schedulingPolicy": "FCFS",
        "apiKeySecretRef": {"name": "a", "key": "a"},
        "extraArgs": ["--middleware=a"],
        "env": ENV,
    },
    "accelerator": {"product": "a", "memory": "1Gi", "resourceName": "a", "count": 1, "perNode": 1},
    "workload": {
        "promptTokens": 2**31 - 2,
        "outputTokens": 1,
        "sharedPrefixTokens": 1,
        "imagesPerRequest": 1,
        "concurrency": 1,
        "ttftMilliseconds": 1,
        "tpotMilliseconds": 1,
    },
    "offload": {
        "cpu": "1Gi",
        "evictionPolicy": "ARC",
        "generatedTokens": "Enabled",
        "disk": "1Gi",
        "storageClassName": "a",
        "shared": {"claim": "a", "path": "a", "size": "1Gi"},
    },
    "disaggregation": {"mode": "Roles", "leaseSeconds": 60, "prefill": ROLE, "decode": ROLE},
    "replicas": 1,
    "presetRef": {"name": "a"},
    "paused": False,
    "rollout": {
        "strategy": "SurgeFirst",
        "maxUnavailable": 2,
        "drainSeconds": 1,
        "startupSeconds": 60,
        "upgrade": "Window",
        "window": {"days": ["Mon"], "start": "00:00", "minutes": 60, "timeZone": "UTC"},
    },
    "picker": {
        "replicas": 1,
        "mode": "Auto",
        "tokenizer": "hf://a",
        "priorities": [{"name": "a", "value": 1}],
        "image": "a",
        "resources": {"requests": {"cpu": 1}, "limits": {"cpu": 1}},
        "env": ENV,
        "podTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": {"a": 1}},
    },
    "gateway": {
        "mode": "Route",
        "flavor": "InferencePool",
        "parentRefs": [
            {"group": "a", "kind": "a", "namespace": "a", "name": "a", "sectionName": "a", "port": 1}
        ],
        "hostnames": ["a"],
        "failureMode": "FailOpen",
        "failoverEndpoints": 1,
        "podTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": {"a": 1}},
    },
    "networkPolicy": {
        "mode": "Auto",
        "from": [
            {
                "podSelector": {
                    "matchLabels": {"a": "b"},
                    "matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}],
                },
                "namespaceSelector": {
                    "matchLabels": {"a": "b"},
                    "matchExpressions": [{"key": "a", "operator": "In", "values": ["b"]}],
                },
            },
            {"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
        ],
    },
    "interconnect": {
        "placement": "Preferred",
        "topologyKey": "a",
        "rdma": {"resourceName": "a/a", "count": 1, "ipcLock": "Enabled"},
    },
    "tracing": {"endpoint": "http://a:4317", "samplingPercent": 10, "engines": "Enabled"},
    "monitoring": {"podMonitor": "Auto"},
    "podTemplate": {"metadata": {"labels": {"a": "b"}}, "spec": {"a": 1}},
}
"""Every field of the spec with a valid value, but those that exclude each other."""
OTHERWISE: dict[Path, dict[str, Any]] = {
    ("offload", "hostPath"): {"cpu": "1Gi", "disk": "1Gi", "hostPath": "/a"},
    ("offload", "lmcache"): {"lmcache": {"memory": "1Gi", "image": "a"}},
    ("offload", "lmcache", "address"): {"lmcache": {"address": "a"}},
}
"""Fields → the section of FULL in which they are valid."""


def whole(path: Path) -> dict[str, Any]:
    """Return a spec with a value at a path."""
    spec = deepcopy(FULL)
    for way, section in OTHERWISE.items():
        if path[: len(way)] == way:
            spec[str(way[0])] = deepcopy(section)
    return spec


@cache
def root() -> Schema:
    """Return the schema of the resource."""
    found: Schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


def leaves(schema: Schema, path: Path = ()) -> Iterator[tuple[Path, Schema]]:
    """Yield every field of a schema; of lists the first item."""
    yield path, schema
    for name, below in (schema.get("properties") or {}).items():
        yield from leaves(below, (*path, name))
    if "items" in schema:
        yield from leaves(schema["items"], (*path, 0))


FIELDS = dict(leaves(root()["properties"]["spec"]))


def read(spec: Any) -> Pool:
    """Return a pool with this spec."""
    meta = {"name": "twig", "namespace": "n"}
    return read_pool(
        {"apiVersion": "kvist.dev/v1alpha1", "kind": "InferencePool", "metadata": meta, "spec": spec},
        preset={"metadata": {"name": "a"}},
    )


def place(path: Path) -> Path:
    """Return the path of a field in FULL, where each source of a variable has an entry of its own."""
    sources = {"secretKeyRef": 1, "configMapKeyRef": 2, "fieldRef": 3}
    if "env" in path and "valueFrom" in path:
        at_env = path.index("env")
        source = str(path[at_env + 3]) if len(path) > at_env + 3 else ""
        return (*path[: at_env + 1], sources.get(source, 1), *path[at_env + 2 :])
    if path[:4] == ("networkPolicy", "from", 0, "ipBlock"):
        return ("networkPolicy", "from", 1, *path[3:])
    return path


def changed(path: Path, value: Any) -> Any:
    """Return FULL with another value at one path."""
    spec = whole(path)
    *way, last = place(path)
    target: Any = spec
    for step in way:
        target = target[step]
    if path in INSTEAD:
        target.clear()
    target[last] = value
    return spec


INSTEAD: dict[Path, str] = {("model", "cache", "hostPath"): "/a"}
"""Fields that exclude the others of their object in FULL, with a valid value."""


def at(path: Path) -> Any:
    """Return the value at a path of FULL."""
    if path in INSTEAD:
        return INSTEAD[path]
    found: Any = whole(path)
    for step in place(path):
        found = found[step]
    return found


def refused(path: Path, value: Any) -> bool:
    """Return whether the reader refuses a value and names its path."""
    try:
        read(changed(path, value))
    except SpecError as error:
        return str(path[-1]) in error.field or str(path[-2]) in error.field
    return False


def test_the_crd_has_no_field_that_the_reader_does_not_know() -> None:
    """A pool with every field of the CRD is read; a field that FULL lacks would be a KeyError here."""
    for path in ((), *OTHERWISE):
        read(whole(path))
    assert [path for path in FIELDS if at(path) is None] == []


def test_the_reader_knows_no_field_that_the_crd_has_not() -> None:
    """Every field that the reader asks for is a field of the CRD."""

    class Asked(dict[str, Any]):
        def __init__(self, raw: Mapping[str, Any], path: Path) -> None:
            super().__init__({key: watched(value, (*path, key)) for key, value in raw.items()})
            self.path = path

        def get(self, key: str, default: Any = None) -> Any:
            seen.add((*self.path, key))
            return super().get(key, default)

    def watched(value: Any, path: Path) -> Any:
        if isinstance(value, dict):
            return Asked(value, path)
        return [watched(item, (*path, 0)) for item in value] if isinstance(value, list) else value

    seen: set[Path] = set()
    for path in ((), *OTHERWISE):
        read(watched(whole(path), ()))

    known = set(FIELDS)
    free = [path for path, schema in FIELDS.items() if schema.get("x-kubernetes-preserve-unknown-fields")]
    ours = {path for path in seen if not any(path[: len(way)] == way for way in free)}
    assert ours - known == set()
    assert len(ours) > 80


def test_numbers_have_the_same_bounds() -> None:
    """The smallest and the largest number are accepted; one beyond is refused."""
    checked = 0
    for path, schema in FIELDS.items():
        if schema.get("type") != "integer" or "enum" in schema:
            continue
        low, high = schema["minimum"], schema.get("maximum", 2**31 - 1)
        assert refused(path, low - 1), (path, low - 1)
        assert refused(path, high + 1), (path, high + 1)
        assert not refused(path, low) or path in SMALL_BY_OTHERS, (path, low)
        assert not refused(path, high) or path in LARGE_BY_OTHERS, (path, high)
        checked += 1
    assert checked > 20


SMALL_BY_OTHERS = {
    *(("engine", field) for field in ("maxNumBatchedTokens", "maxModelLen")),
    ("workload", "promptTokens"),
    *(("disaggregation", role, "engine", "maxNumBatchedTokens") for role in ("prefill", "decode")),
}
LARGE_BY_OTHERS: set[Path] = {
    ("workload", field) for field in ("promptTokens", "outputTokens", "sharedPrefixTokens")
}
"""Numbers that another field of FULL bounds too."""


def test_choices_are_the_same() -> None:
    """Every choice of the CRD is accepted, and no other value."""
    for path, schema in FIELDS.items():
        for choice in schema.get("enum", ()):
            if path not in CHOICES_OF_OTHERS and path[-1] != "operator":
                assert not refused(path, choice), (path, choice)
        if "enum" in schema:
            assert refused(path, 17 if schema["type"] == "integer" else "Otherwise"), path


CHOICES_OF_OTHERS: set[Path] = {
    *(("engine", "speculative", "method"), ("networkPolicy", "mode"), ("disaggregation", "mode")),
    *(("disaggregation", role, "scaling") for role in ("prefill", "decode")),
    ("picker", "mode"),
}
"""Choices that other fields of FULL contradict; so do those of a label selector's operator."""


def test_strings_and_lists_have_the_same_length() -> None:
    """The length that the CRD allows is accepted; one character or item more is refused."""
    for path, schema in FIELDS.items():
        if schema.get("type") == "string" and "enum" not in schema and not LOOKED_UP & set(path):
            longest = _of_length(at(path), schema["maxLength"])
            assert not refused(path, longest), path
            assert refused(path, _of_length(at(path), schema["maxLength"] + 1)), path
        if schema.get("type") == "array":
            words = schema["items"].get("enum")
            made = [_numbered(at(path)[0], i) for i in range(schema["maxItems"] + 1)]
            items = [*words, words[0]] if words else made
            assert not refused(path, items[:-1]) or "except" in path, path
            assert refused(path, items), path


LOOKED_UP = {"timeZone", "cidr", "except"}
"""Strings that are looked up or parsed, so that their length says nothing."""


def _of_length(text: str, length: int) -> str:
    if "://a:" in text:  # the host of an address can be long, its port cannot
        return text.replace("://a:", f"://a{'a' * (length - len(text))}:")
    return text + ("0" if text[-1].isdigit() else text[-1]) * (length - len(text))


def _numbered(item: Any, number: int) -> Any:
    return {**item, "name": f"a{number}"} if isinstance(item, dict) and "name" in item else item


@pytest.mark.parametrize(
    ("path", "wrong"),
    [
        (("model", "servedName"), "two words"),
        (("tracing", "endpoint"), "https://collector:4317"),
        (("tracing", "endpoint"), "http://collector"),
        (("model", "adapters", 0, "name"), "../up"),
        (("model", "shape", "checkpointSize"), "1GB"),
        (("model", "cache", "hostPath"), "cache"),
        (("offload", "storageClassName"), "Fast"),
        (("offload", "hostPath"), "cache"),
        (("offload", "shared", "claim"), "Fast"),
        (("offload", "shared", "path"), "/root"),
        (("offload", "shared", "size"), "1GB"),
        (("offload", "lmcache", "address"), "tcp://a:port"),
        (("engine", "attentionBackend"), "flash"),
        (("engine", "version"), "latest"),
        (("engine", "env", 0, "name"), "1A"),
        (("picker", "env", 0, "name"), "1A"),
        (("accelerator", "resourceName"), "a b"),
        (("rollout", "maxUnavailable"), "0%"),
        (("picker", "priorities", 0, "name"), "a,b"),
        (("picker", "resources", "limits"), {"cpu": "much"}),
        (("gateway", "hostnames", 0), "Upper.example"),
    ],
)
def test_patterns_are_the_same(path: Path, wrong: Any) -> None:
    """A value that does not match a pattern of the CRD is refused by the reader."""
    schema = FIELDS[path]
    if isinstance(wrong, dict):
        schema, text = schema["additionalProperties"], next(iter(wrong.values()))
    else:
        text = wrong
    assert re.search(schema["pattern"], text) is None
    assert refused(path, wrong)


def test_defaults_are_the_same() -> None:
    """A pool with the CRD's defaults filled in is the pool without them."""
    filled_in = 0
    for case in cases("valid"):
        filled = defaulted(case.pool["spec"], root()["properties"]["spec"])
        assert read(filled) == read(case.pool["spec"]), case.name
        filled_in += filled != case.pool["spec"]
    assert filled_in > 5


def test_defaults_that_a_preset_may_change_are_not_in_the_schema() -> None:
    """The API server writes a default into the pool, where it would hide the preset's value; so the
    description names it, and the reader has it."""
    written = [path for path, schema in FIELDS.items() if "default" in schema]
    assert all(path[0] not in SECTIONS or 0 in path for path in written), written
    named = {path: said for path, schema in FIELDS.items() if (said := _named_default(schema))}
    assert len(named) > 11
    for path, text in named.items():
        if path in MADE_LATER:
            continue
        value: Any = int(text) if FIELDS[path].get("type") != "string" else text
        absent = changed(path, None)
        assert read(changed(path, value)) == read(absent), path


MADE_LATER = {("workload", "concurrency"), ("gateway", "hostnames")}
"""Fields whose default is not the reader's: the plan's number, and every host name."""


def _named_default(schema: Schema) -> str:
    found = re.search(r"Default, ([\w:]+)\.$", str(schema.get("description", "")))
    return found.group(1) if found else ""


def test_the_crd_of_presets_is_made_from_that_of_pools() -> None:
    """A preset has the sections of a pool, with the same fields and rules, and requires none."""
    assert PRESETS.read_text() == preset_crd()
    presets = yaml.safe_load(PRESETS.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    spec = presets["properties"]["spec"]
    pools = root()["properties"]["spec"]["properties"]

    assert (
        set(spec["properties"])
        == set(SECTIONS)
        == set(pools) - {*("replicas", "paused", "presetRef", "disaggregation")}
    )
    assert "required" not in spec
    for name in SECTIONS:
        if name != "model":
            assert spec["properties"][name] == pools[name]
    assert set(spec["properties"]["model"]["properties"]) == set(pools["model"]["properties"]) - set(
        OF_ONE_POOL
    )


def defaulted(value: Any, schema: Schema) -> Any:
    """Return a resource with the defaults of absent fields, as the API server fills them in."""
    if isinstance(value, dict):
        below = schema.get("properties") or {}
        filled = {name: s["default"] for name, s in below.items() if "default" in s} | value
        return {name: defaulted(v, below.get(name, {})) for name, v in filled.items()}
    return [defaulted(v, schema.get("items", {})) for v in value] if isinstance(value, list) else value


VOCABULARY = (
    *("type", "format", "description", "default", "enum", "nullable", "required", "properties", "items"),
    *(
        "additionalProperties",
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "pattern",
        "minItems",
        "maxItems",
    ),
    *("minProperties", "maxProperties"),
)


def test_the_crd_uses_only_keywords_that_the_api_server_knows() -> None:
    """A description with a comma, unquoted, would become keys of its own, which kubectl refuses."""
    odd = [
        (path, key)
        for path, schema in leaves(root())
        for key in schema
        if key not in VOCABULARY and not key.startswith("x-kubernetes-")
    ]
    assert odd == []


def test_every_field_is_described() -> None:
    """Every field has a description for `kubectl explain`."""
    silent = [path for path, schema in leaves(root()) if _speaks(path) and not schema.get("description")]

    assert silent == []


def _speaks(path: Path) -> bool:
    return bool(path) and path[0] in ("spec", "status") and not isinstance(path[-1], int)


def test_everything_is_bounded() -> None:
    """Every string, list and map has a limit, so the cost of rules and the size of a pool are bounded."""
    limits = {"string": "maxLength", "array": "maxItems"}
    for path, schema in leaves(root()["properties"]["spec"]):
        limit = limits.get(schema.get("type", ""))
        assert limit is None or limit in schema or "enum" in schema, path
        if "additionalProperties" in schema:
            assert "maxProperties" in schema, path


@pytest.mark.parametrize("case", CASES)
def test_a_plan_fits_into_the_status(case: str) -> None:
    """``status.plan`` has only fields of the CRD, of their types and within their bounds."""
    schema = root()["properties"]["status"]["properties"]["plan"]

    assert list(complaints(plan_status(made(case)), schema)) == []


def complaints(value: Any, schema: Schema, path: Path = ()) -> Iterator[str]:
    """Yield the violations of a structural schema by a value."""
    kinds: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "array": list,
        "object": dict,
        "boolean": bool,
    }
    if not isinstance(value, kinds[schema["type"]]):
        yield f"{path}: {value!r} is no {schema['type']}"
    elif isinstance(value, dict) and not schema.get("x-kubernetes-preserve-unknown-fields"):
        for name, below in value.items():
            known = (schema.get("properties") or {}).get(name) or schema.get("additionalProperties")
            if known is None:
                yield f"{path}: {name} is not in the CRD"
            else:
                yield from complaints(below, known, (*path, name))
    elif isinstance(value, list):
        if len(value) > schema["maxItems"]:
            yield f"{path}: {len(value)} items"
        for i, item in enumerate(value):
            yield from complaints(item, schema["items"], (*path, i))
    elif len(str(value)) > schema.get("maxLength", 10**9) or value not in schema.get("enum", [value]):
        yield f"{path}: {value!r}"
