"""Runbooks of pickers followed on a real cluster, as in ``test_runbooks`` (``make bench-alerts``)."""

import base64
import datetime as dt
import json
from typing import Any

import pytest
from tests.cluster import observed
from tests.cluster.observed import SECRET, Observed, operators, remove_certificate

from kvist_kube.certificates import CLIENT, SERVER, CertificateAuthority

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
Json = dict[str, Any]
seen, rested = observed.seen, observed.rested


async def test_replicas_with_a_certificate_for_other_names_get_another(seen: Observed) -> None:
    """A certificate that names other hosts keeps new replicas apart, and /debug/peers says so; the operator
    makes another one for deleted objects, and replicas load it."""
    now = dt.datetime.now(dt.UTC)
    authority = CertificateAuthority("kvist pickers", now, dt.timedelta(days=30))
    leaf, key = authority.sign(["other.example"], now, dt.timedelta(days=30), (SERVER, CLIENT))
    await operators(seen, 0)
    made = {"tls.crt": leaf, "tls.key": key, "ca.crt": authority.pem}
    data = {name: base64.b64encode(content).decode() for name, content in made.items()}
    await seen.twig.room.patch("Secret", SECRET, {"data": data})
    await seen.delete_pods("picker")
    await seen.fires("KvistPickerReplicasApart", seconds=90)
    for pod in await seen.pods("picker"):
        addresses = json.loads(await seen.page(pod, "/debug/peers"))["addresses"]
        assert "Hostname Verification Check failed" in " ".join(each["problem"] for each in addresses)
    await operators(seen, 1)
    await remove_certificate(seen)
    await seen.ends("KvistPickerReplicasApart", seconds=120)
    await seen.twig.until_ready()


async def test_a_key_of_another_certificate_is_replaced(seen: Observed) -> None:
    """Pickers refuse a key that does not fit; the operator makes a pair that does for deleted ones."""
    now = dt.datetime.now(dt.UTC)
    authority = CertificateAuthority("other", now, dt.timedelta(days=3))
    _, key = authority.sign(["other"], now, dt.timedelta(days=3), (SERVER, CLIENT))
    await operators(seen, 0)
    data = {"tls.key": base64.b64encode(key).decode()}
    await seen.twig.room.patch("Secret", SECRET, {"data": data})
    await seen.fires("KvistCertificateRefused", seconds=90)
    await operators(seen, 1)
    await remove_certificate(seen)
    await seen.ends("KvistCertificateRefused", seconds=120)


async def test_a_tokenizer_that_cannot_be_had_is_corrected(seen: Observed) -> None:
    """Pickers without a tokenizer use routing history for all endpoints; the right one ends the alert."""
    await seen.twig.patch(picker={"tokenizer": "hf://nowhere/none"})
    await seen.fires("KvistTokenizerUnusable", seconds=120)
    await seen.twig.patch(picker={"tokenizer": None})
    await seen.ends("KvistTokenizerUnusable", seconds=120)
    await seen.twig.until_ready()


async def test_a_picker_without_rights_gets_them_back(seen: Observed) -> None:
    """New pickers without their RoleBinding cannot follow pods; the operator restores it, and they do."""
    await operators(seen, 0)
    await seen.twig.room.remove("RoleBinding", "twig-epp")
    await seen.delete_pods("picker")
    await seen.fires("KvistDiscoveryLost", seconds=90)
    await operators(seen, 1)
    await seen.ends("KvistDiscoveryLost", seconds=90)
    await seen.twig.until_ready()
