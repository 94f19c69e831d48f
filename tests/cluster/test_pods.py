"""Pods as the real API server reports them."""

from tests.cluster.client import Namespace
from tests.cluster.control_plane import ControlPlane
from tests.cluster.following import following

from kvist_epp.endpoints.kubernetes.pools import PodSelection


async def test_the_states_of_a_pod(plane: ControlPlane, space: Namespace) -> None:
    """A pod is followed from the moment it runs, picked while it is ready, and forgotten when it has gone."""
    async with following(plane.kubeconfig("admin"), space) as seen:
        await seen.until(lambda: seen.fleets != [])
        assert (len(seen.fleets[0]), seen.discovery.problem) == (0, "")

        await space.pod("a", "10.0.0.1", ready=False)
        await seen.stands({"a": "not ready"})
        await space.status("a", ready=True)
        await seen.stands({"a": ""})
        endpoint = seen.fleets[-1].by_key(f"{space.name}/a")
        assert endpoint is not None
        assert (endpoint.hostport, endpoint.kv_events) == ("10.0.0.1:8000", "tcp://10.0.0.1:5557")

        await space.status("a", ready=False)
        await seen.stands({"a": "not ready"})
        await space.status("a", ready=True)
        await seen.stands({"a": ""})
        again = seen.fleets[-1].by_key(f"{space.name}/a")
        assert again is not None
        assert again.identity == endpoint.identity

        await space.delete("a")
        await seen.stands({"a": "terminating"})
        await space.delete("a", seconds=0)
        await seen.stands({})


async def test_a_pod_of_the_same_name_is_another_one(plane: ControlPlane, space: Namespace) -> None:
    """A pod that is deleted and made again under its name and address has another uid, so nothing is carried
    over."""
    await space.pod("a", "10.0.0.1")
    async with following(plane.kubeconfig("admin"), space) as seen:
        await seen.stands({"a": ""})
        await space.delete("a", seconds=0)
        made = await space.pod("a", "10.0.0.1")
        await seen.until(lambda: [e.uid for e in seen.fleets[-1]] == [made["metadata"]["uid"]])

        first, last = (next(iter(seen.fleets[n])) for n in (0, -1))
        assert first.identity != last.identity
        assert {s.publisher for s in first.sources} & {s.publisher for s in last.sources} == set()


async def test_what_a_pod_says_of_itself(plane: ControlPlane, space: Namespace) -> None:
    """Roles, ports, ranks and addresses come from labels, annotations and status, IPv6 included."""
    await space.pod("six", "fd00::5", labels={"kvist.dev/max-num-seqs": "64"})
    await space.pod("quiet", "10.0.0.2", annotations={"kvist.dev/kv-events": "false"})
    await space.pod(
        "own",
        "10.0.0.3",
        labels={"llm-d.ai/role": "prefill"},
        annotations={"kvist.dev/kv-events-port": "7000", "kvist.dev/data-parallel-size": "2"},
    )
    await space.pod("done", "10.0.0.4")
    await space.status("done", phase="Succeeded")
    await space.pod("stranger", "10.0.0.9", labels={"app": "other"})
    async with following(plane.kubeconfig("admin"), space) as seen:
        await seen.stands({"six": "", "quiet": "", "own": ""})

        fleet = {endpoint.name: endpoint for endpoint in seen.fleets[-1]}
        six, quiet, own = fleet["six"], fleet["quiet"], fleet["own"]
        assert (six.hostport, six.kv_events) == ("[fd00::5]:8000", "tcp://[fd00::5]:5557")
        assert (six.max_num_seqs, quiet.sources, own.role) == (64, (), "prefill")
        assert [s.events for s in own.sources] == ["tcp://10.0.0.3:7000", "tcp://10.0.0.3:7001"]


async def test_a_port_for_each_rank(plane: ControlPlane, space: Namespace) -> None:
    """A pod with several target ports is several endpoints, each with its own rank's events."""
    await space.pod("a", "10.0.0.1")
    ports = PodSelection("app in (vllm),!canary", (8000, 8001))
    async with following(plane.kubeconfig("admin"), space, ports) as seen:
        await seen.stands({"a-rank-0": "", "a-rank-1": ""})

        sources = [source for endpoint in seen.fleets[-1] for source in endpoint.sources]
        assert seen.hostports == ["10.0.0.1:8000", "10.0.0.1:8001"]
        assert [(s.rank, s.events) for s in sources] == [
            (0, "tcp://10.0.0.1:5557"),
            (1, "tcp://10.0.0.1:5558"),
        ]
        assert len({source.publisher for source in sources}) == 2

        await space.label("a", canary="yes")
        await seen.stands({})


async def test_a_selector_that_is_none_is_named(plane: ControlPlane, space: Namespace) -> None:
    """A selector that the API server cannot parse is reported as a problem, and there is no fleet."""
    async with following(plane.kubeconfig("admin"), space, PodSelection("app=(", (8000,))) as seen:
        await seen.until(lambda: seen.discovery.problem != "")
        assert "400" in seen.discovery.problem
        assert "app=(" in seen.discovery.problem
        assert seen.fleets == []
