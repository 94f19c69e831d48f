"""Reader of ``spec.networkPolicy``: its mode, and peers as in ``networking.k8s.io/v1``. Pure."""

import ipaddress
from collections.abc import Mapping
from typing import Any, Final

from kvist_operator.errors import SpecError

from .fields import Fields, text_of
from .pool import NetworkPolicySpec

MODES: Final = ("Auto", "Open", "Off")
OPERATORS: Final = ("In", "NotIn", "Exists", "DoesNotExist")
LABEL_KEY: Final = r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
LABEL_VALUE: Final = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
KEY_LENGTH: Final = 317
"""Characters of a label's key: a prefix of 253, a slash, a name of 63."""
VALUE_LENGTH: Final = 63
PEER: Final = "write podSelector, namespaceSelector or both, or ipBlock"


def read_network_policy(f: Fields) -> NetworkPolicySpec:
    """Return the fields. Raises SpecError."""
    mode = f.text("mode", "Auto", choices=MODES)
    clients = tuple(_peer(each) for each in f.sections("from", most=16))
    if clients and mode != "Auto":
        raise SpecError(f.at("from"), f"contradicts mode: {mode}, which allows every client: leave one out")
    return f.done(NetworkPolicySpec(mode=mode, clients=clients))


def _peer(f: Fields) -> Mapping[str, Any]:
    found = {
        "podSelector": _selector(f.optional("podSelector")),
        "namespaceSelector": _selector(f.optional("namespaceSelector")),
        "ipBlock": _block(f.optional("ipBlock")),
    }
    given = f.done({key: value for key, value in found.items() if value is not None})
    if not given or ("ipBlock" in given and len(given) > 1):
        raise SpecError(f.path, f"{'is empty' if not given else 'mixes addresses and selectors'}: {PEER}")
    return given


def _selector(f: Fields | None) -> Mapping[str, Any] | None:
    """Return a label selector; an empty one selects everything."""
    if f is None:
        return None
    labels = f.free("matchLabels")
    if len(labels) > 16:
        raise SpecError(f.at("matchLabels"), f"has {len(labels)} entries; at most 16")
    for key, value in labels.items():
        path = f"{f.at('matchLabels')}.{key}"
        text_of(key, path, pattern=LABEL_KEY, like="app.kubernetes.io/name", most=KEY_LENGTH)
        text_of(value, path, pattern=LABEL_VALUE, like="prometheus", most=VALUE_LENGTH)
    rules = [_rule(each) for each in f.sections("matchExpressions", most=16)]
    found = {"matchLabels": dict(labels), "matchExpressions": rules}
    return f.done({key: value for key, value in found.items() if value})


def _rule(f: Fields) -> Mapping[str, Any]:
    key = f.required(
        "key", "the label's key", pattern=LABEL_KEY, like="app.kubernetes.io/name", most=KEY_LENGTH
    )
    operator = f.text("operator", "", choices=OPERATORS)
    values = f.texts("values", most=32, each=VALUE_LENGTH, pattern=LABEL_VALUE, like="prometheus")
    if not operator:
        raise SpecError(f.at("operator"), f"is missing: one of {', '.join(OPERATORS)}")
    if bool(values) != (operator in ("In", "NotIn")):
        remedy = "leave it out" if values else "give the label's values"
        raise SpecError(f.at("values"), f"does not go with operator {operator}: {remedy}")
    return f.done({"key": key, "operator": operator, **({"values": list(values)} if values else {})})


def _block(f: Fields | None) -> Mapping[str, Any] | None:
    if f is None:
        return None
    whole = _network(f.required("cidr", "a range of addresses, such as 10.0.0.0/8", most=64), f.at("cidr"))
    without = f.texts("except", most=16, each=64)
    for i, text in enumerate(without):
        path = f"{f.at('except')}[{i}]"
        part = _network(text, path)
        within = part.version == whole.version and part.prefixlen > whole.prefixlen
        if not within or part.network_address not in whole:
            raise SpecError(path, f"{text} is not a part of {whole}: write a smaller range within it")
    return f.done({"cidr": str(whole), **({"except": list(without)} if without else {})})


def _network(text: str, path: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError as error:
        raise SpecError(path, f"{text!r} is not a range of addresses: write it like 10.0.0.0/8") from error
