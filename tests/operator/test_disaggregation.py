"""Plans, objects and conditions of disaggregated pools."""

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.crd.cases import planned
from tests.operator.manifested import SITE, one, rendered, resource
from tests.operator.pools import chosen, known, pool, reason
from tests.operator.test_crd_agrees import complaints, root
from tests.operator.test_status import NOW, conditions, workload

from kvist_epp.settings.settings import Settings
from kvist_operator.manifests import Api, Site, render
from kvist_operator.plan import Plan, make_plan
from kvist_operator.reconcile.cache_reports import EngineReport, MergedReport, figures, kv_tokens
from kvist_operator.spec import Pool, read_pool
from kvist_operator.status import ObservedPool, Subject, status
from kvist_operator.status.pairs import pairs_of

Json = dict[str, Any]
NAME = "Qwen/Qwen3-8B"
KV_LABEL, ROLE = "kvist.dev/kv-compatibility", "kvist.dev/role"


def roles(**spec: Any) -> Pool:
    """Return a pool with roles on H100; ``prefill`` and ``decode`` are theirs, the rest the pool's."""
    own = {role: spec.pop(role, {}) for role in ("prefill", "decode")}
    spec = {"accelerator": {"product": "H100-80GB"}, **spec}
    return pool(f"hf://{spec.pop('name', NAME)}", disaggregation={"mode": "Roles", **own}, **spec)


def plan_of(found: Pool, name: str = NAME) -> Plan:
    """Return the plan of a pool."""
    return make_plan(found, known(name))


def value(plan: Plan, flag: str) -> str:
    """Return the value of one argument."""
    return plan.argv[plan.argv.index(flag) + 1]


def test_prefill_has_large_steps_and_decode_many_sequences() -> None:
    """Prefill computes more tokens in a step and fewer sequences at once than decode; both say why, and what
    a transfer costs."""
    found = plan_of(roles(workload={"promptTokens": 8000, "outputTokens": 200}))
    assert found.prefill is not None

    tokens, sequences = "--max-num-batched-tokens", "--max-num-seqs"
    assert int(value(found.prefill, tokens)) > int(value(found, tokens))
    assert int(value(found.prefill, sequences)) < int(value(found, sequences))
    assert "bound by compute" in reason(found.prefill, "role")
    assert "bound by the cache" in reason(found, "role")
    assert "ms at 25 Gbit/s" in reason(found, "kvTransfer")


def test_the_connector_of_each_role_recomputes_what_it_cannot_load() -> None:
    """Roles have the producer and the consumer of NIXL, always with ``recompute`` and the lease; with places
    for offloaded blocks NIXL is asked first."""
    found = plan_of(roles(offload={"cpu": "64Gi"}))
    assert found.prefill is not None
    for plan, role in ((found, "kv_consumer"), (found.prefill, "kv_producer")):
        config = json.loads(value(plan, "--kv-transfer-config"))
        first, second = config["kv_connector_extra_config"]["connectors"]
        assert (first["kv_connector"], first["kv_role"]) == ("NixlConnector", role)
        assert second["kv_connector"] == "OffloadingConnector"
        assert {each["kv_load_failure_policy"] for each in (config, first, second)} == {"recompute"}
        assert first["kv_connector_extra_config"] == {"kv_lease_duration": 30}


def test_what_a_role_sets_is_its_own_and_the_rest_is_the_pool_s() -> None:
    """Accelerator, parallelism, arguments and variables of a role replace or extend those of the pool."""
    found = roles(
        engine={"extraArgs": ["--seed", "1"], "env": [{"name": "A", "value": "pool"}]},
        decode={
            "accelerator": {"product": "H200-141GB"},
            "engine": {"tensorParallelSize": 2, "env": [{"name": "A", "value": "own"}]},
        },
        prefill={"engine": {"extraArgs": ["--max-log-len", "9"]}},
    )
    plan = plan_of(found)
    assert plan.prefill is not None
    assert (plan.hardware.accelerator.name, plan.layout.tensor) == ("H200-141GB", 2)
    assert (plan.prefill.hardware.accelerator.name, plan.prefill.layout.tensor) == ("H100-80GB", 1)
    assert plan.argv[-2:] == ("--seed", "1")
    assert plan.prefill.argv[-4:] == ("--seed", "1", "--max-log-len", "9")
    assert (plan.env["A"], plan.prefill.env["A"]) == ("own", "pool")


def test_prefill_is_not_wider_than_decode_by_itself() -> None:
    """The plan gives prefill at most as many tensor-parallel ranks as decode."""
    found = plan_of(
        roles(
            name="meta-llama/Llama-3.3-70B-Instruct",
            decode={"accelerator": {"count": 2}},
            engine={"quantization": "FP8"},
            prefill={"accelerator": {"count": None}},
        ),
        "meta-llama/Llama-3.3-70B-Instruct",
    )
    assert found.prefill is not None
    assert found.prefill.layout.tensor <= found.layout.tensor


def test_a_dtype_of_the_cache_that_one_role_lacks_is_used_by_none() -> None:
    """Auto leaves FP8 out in both roles where one accelerator does not have it."""
    found = plan_of(
        roles(
            prefill={"accelerator": {"product": "A100-80GB"}},
            engine={"attentionBackend": "TRITON_ATTN"},
        )
    )
    assert found.prefill is not None
    assert "--kv-cache-dtype" not in {*found.argv, *found.prefill.argv}
    assert chosen(found, "kvCacheDtype") == chosen(found.prefill, "kvCacheDtype") == "bfloat16"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"prefill": {"engine": {"maxNumSeqs": 8}}}, True),
        ({"decode": {"engine": {"tensorParallelSize": 2}}}, True),
        ({"prefill": {"replicas": 7}}, True),
        ({"engine": {"image": "vllm/vllm-openai:v0.32.0"}}, False),
        ({"engine": {"kvCacheDtype": "Model"}}, False),
        ({"engine": {"extraArgs": ["--block-size", "32"]}}, False),
        ({"engine": {"attentionBackend": "TRITON_ATTN"}}, False),
        ({"engine": {"env": [{"name": "VLLM_KV_CACHE_LAYOUT", "value": "NHD"}]}}, False),
        ({"model": {"revision": "a" * 40}}, False),
        ({"offload": {"cpu": "8Gi"}}, False),
    ],
)
def test_compatibility_is_of_all_that_has_to_be_equal(change: Json, same: bool) -> None:
    """The label is equal in both roles; it changes with what the handshake, the weights or the connectors
    depend on, and with nothing in which roles may differ."""
    first, second = plan_of(roles()), plan_of(roles(**change))
    assert second.prefill is not None

    assert second.kv_compatibility == second.prefill.kv_compatibility
    assert (first.kv_compatibility == second.kv_compatibility) is same


def test_each_role_has_a_workload_that_selects_its_own_pods() -> None:
    """Two Deployments with roles in selector and labels, which the picker reads; pods say where other engines
    find them, and may reach each other."""
    found = rendered("roles")
    seen = {}
    for role, replicas in (("prefill", 2), ("decode", 4)):
        made = one(found, "Deployment", f"twig-{role}")
        pod = made["spec"]["template"]
        assert made["spec"]["replicas"] == replicas
        assert made["spec"]["selector"]["matchLabels"][ROLE] == role
        assert made["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        seen[role] = pod["metadata"]["labels"][KV_LABEL]
        [engine] = [each for each in pod["spec"]["containers"] if each["name"] == "engine"]
        env = {each["name"]: each for each in engine["env"]}
        host = env["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"]
        assert (host, env["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"]) == ("status.podIP", "5600")
        assert {"name": "kv-transfer", "containerPort": 5600, "protocol": "TCP"} in engine["ports"]
        assert engine["resources"]["limits"]["rdma/hca"] == "1"
    assert seen["prefill"] == seen["decode"]
    assert not [o for o in found.objects if (o["kind"], o["metadata"]["name"]) == ("Deployment", "twig")]
    [inside] = [
        rule for rule in one(found, "NetworkPolicy", "twig")["spec"]["ingress"] if "ports" not in rule
    ]
    assert inside["from"] == [
        {
            "podSelector": {
                "matchLabels": {"app.kubernetes.io/instance": "twig", "app.kubernetes.io/component": "engine"}
            }
        }
    ]


def test_the_picker_is_told() -> None:
    """The picker gets the mode and the lease; those of other pools get neither flag."""
    [container] = one(rendered("roles"), "Deployment", "twig-epp")["spec"]["template"]["spec"]["containers"]
    flags = Settings.from_args(container["args"])
    assert (flags.disaggregation, flags.kv_lease) == ("on", 60.0)

    [container] = one(rendered("minimal"), "Deployment", "twig-epp")["spec"]["template"]["spec"]["containers"]
    assert not [each for each in container["args"] if "disaggregation" in each or "kv-lease" in each]


def test_an_autoscaler_owns_the_replicas_of_its_role() -> None:
    """With scaling External the workload has no replicas, so that an autoscaler owns the field."""
    own = roles(prefill={"scaling": "External"})
    found = render(own, plan_of(own), Site())
    assert "replicas" not in one(found, "Deployment", "twig-prefill")["spec"]
    assert one(found, "Deployment", "twig-decode")["spec"]["replicas"] == 1


def test_a_role_over_two_nodes_is_a_leader_worker_set() -> None:
    """A role whose replica spans nodes is a LeaderWorkerSet of its own, and the other role a Deployment."""
    own = pool(
        "hf://deepseek-ai/DeepSeek-R1",
        accelerator={"product": "H200-141GB"},
        interconnect={"rdma": {"resourceName": "rdma/hca"}},
        disaggregation={
            "mode": "Roles",
            "decode": {
                "engine": {"tensorParallelSize": 1, "dataParallelSize": 16, "pipelineParallelSize": 1}
            },
            "prefill": {"engine": {"tensorParallelSize": 1, "dataParallelSize": 8}},
        },
    )
    plan = make_plan(own, known("deepseek-ai/DeepSeek-R1"))
    assert plan.prefill is not None
    assert (plan.nodes, plan.prefill.nodes) == (2, 1)
    found = render(own, plan, Site())
    made = one(found, "LeaderWorkerSet", "twig-decode")
    template = made["spec"]["leaderWorkerTemplate"]
    assert {template[each]["metadata"]["labels"][ROLE] for each in ("leaderTemplate", "workerTemplate")} == {
        "decode"
    }
    assert one(found, "Deployment", "twig-prefill")
    with pytest.raises(Exception, match="install LeaderWorkerSet"):
        render(own, plan, Site(apis=frozenset(Api) - {Api.LEADER_WORKER_SET}))


def test_advice_says_what_tcp_costs_and_which_gateway_is_not_ours() -> None:
    """Without RDMA the advice has the cost of TCP; a gateway of others gets one on its timeout."""
    own = roles(gateway={"mode": "Route", "parentRefs": [{"name": "public"}]})
    notes = {note.reason: note.message for note in render(own, plan_of(own), SITE).notes}
    assert "ms at 25 Gbit/s" in notes["TransferOverTcp"]
    assert "200 ms by default" in notes["GatewayTimeoutUnknown"]

    reasons = {note.reason for note in rendered("roles").notes}
    assert not {"TransferOverTcp", "GatewayTimeoutUnknown"} & reasons


def engine(role: str, compatibility: str, *, ready: bool = True) -> Json:
    """Return a pod of an engine."""
    labels = {"kvist.dev/pool": "twig", ROLE: role, KV_LABEL: compatibility}
    state = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {"metadata": {"name": "a", "labels": labels}, "status": {"conditions": state}}


def said(case: str, *pods: Json, **workloads: Any) -> tuple[str, str, str]:
    """Return status, reason and message of Disaggregated."""
    found = resource(case)
    subject = Subject(name="twig", generation=3, pool=read_pool(found), plan=planned(found))
    observed = ObservedPool(workload=workload(4), picker=workload(), pairs=pairs_of(pods), **workloads)
    each = conditions(status(subject, observed, {}, NOW))["Disaggregated"]
    return each["status"], each["reason"], each["message"]


def test_the_condition_says_whether_engines_have_partners() -> None:
    """Engines pair within one compatibility; a role without engines, generations that do not pair and a
    single engine are each said in words."""
    old, new = [engine(role, "a") for role in ("prefill", "decode")], engine("decode", "b")
    assert said("roles", *old)[:2] == ("True", "Paired")
    assert said("roles", *old, new) == (
        "True",
        "PartlyPaired",
        "with a partner: 1 of 1 engines for prefill, 1 of 2 for decode; a rollout replaces the others",
    )
    truth, reason_, message = said("roles", old[0], new)
    assert (truth, reason_) == ("False", "NoPairs")
    assert "those for prefill have a, those for decode b" in message
    assert said("roles", old[1], engine("prefill", "a", ready=False))[:2] == ("False", "NoPrefill")
    assert said("roles", old[0])[:2] == ("False", "NoDecode")

    alike = [engine("both", "a"), engine("both", "a")]
    assert said("fluid", *alike)[:2] == ("True", "Paired")
    assert said("fluid", alike[0])[:2] == ("False", "OneEngine")
    assert said("fluid", alike[0], engine("both", "b"))[:2] == ("False", "NoPairs")
    assert said("fluid", *alike, engine("both", "b"))[:2] == ("True", "PartlyPaired")


def test_the_status_has_the_workloads_of_the_roles_and_agrees_with_the_crd() -> None:
    """Replicas of the pool are those of decode, by which it is scaled; each role names its workload, and the
    plan of prefill is inside that of decode."""
    found = resource("roles")
    subject = Subject(name="twig", generation=3, pool=read_pool(found), plan=planned(found))
    decode, prefill = workload(4), workload(2, readyReplicas=1)
    for role, each in (("decode", decode), ("prefill", prefill)):
        each["metadata"]["name"] = f"twig-{role}"
    made = status(subject, ObservedPool(workload=decode, prefill=prefill, picker=workload()), {}, NOW)

    assert (made["replicas"], made["selector"]) == (4, "kvist.dev/pool=twig,kvist.dev/role=decode")
    assert made["roles"]["prefill"] == {
        "kind": "Deployment",
        "name": "twig-prefill",
        "replicas": 2,
        "readyReplicas": 1,
        "updatedReplicas": 2,
        "selector": "kvist.dev/pool=twig,kvist.dev/role=prefill",
    }
    assert conditions(made)["Progressing"]["message"].startswith("ready: 5 of 6")
    assert made["plan"]["prefill"]["role"] == "prefill"
    schema, prefill_plan = root()["properties"]["status"], made["plan"].pop("prefill")
    assert list(complaints(made, schema)) == []
    assert list(complaints(prefill_plan, schema["properties"]["plan"])) == []


def test_figures_of_pickers_are_told_apart_by_role() -> None:
    """Engines that only prefill have figures of their own, and do not count for the size of the cache."""
    engines = {
        role: EngineReport(pod=role, endpoint=role, role=role, ready=True, kv_tokens=size, waiting=size)
        for role, size in (("prefill", 10), ("decode", 70))
    }
    found = MergedReport(engines, 1)

    assert kv_tokens(found) == 70
    assert (figures(found).waiting, figures(found, prefill=True).waiting) == (70, 10)
    plain = {at: replace(each, role="") for at, each in engines.items()}
    assert figures(MergedReport(plain, 1)).waiting == 40
