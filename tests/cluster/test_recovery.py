"""Failures between the picker and a real API server, which the fleet outlives."""

from tests.cluster.client import Namespace, client
from tests.cluster.control_plane import ControlPlane
from tests.cluster.following import Seen, following

from kvist_kube.informer import InformerTimes
from kvist_sim.relays import TcpRelay

LIVELY = InformerTimes(silence=2.0)


async def test_the_api_server_dies_and_comes_back(plane: ControlPlane, space: Namespace) -> None:
    """While the API server is away, the last fleet stands and the problem is reported; changes made meanwhile
    are seen afterwards."""
    await space.pod("a", "10.0.0.1")
    await space.pod("b", "10.0.0.2")
    async with following(plane.kubeconfig("admin"), space) as seen:
        await seen.stands({"a": "", "b": ""})
        told = len(seen.fleets)

        await plane.kill_apiserver()
        await seen.until(lambda: seen.discovery.problem != "")
        assert (len(seen.fleets), seen.watch()["watching"]) == (told, False)

        await plane.start_apiserver()
        async with client(plane) as admin:
            again = Namespace(admin, space.name)
            await again.status("a", ready=False)
            await again.delete("b", seconds=0)
            await seen.stands({"a": "not ready"})
        await seen.until(lambda: seen.discovery.problem == "")


async def test_an_expired_watch_is_answered_by_a_list(
    plane: ControlPlane, space: Namespace, relay: TcpRelay
) -> None:
    """Parted for longer than the API server's memory: 410 is answered by a list, the fleet is right at
    once."""
    await space.pod("a", "10.0.0.1")
    way = plane.kubeconfig("relayed", server=f"https://{relay.address}")
    async with following(way, space, times=LIVELY) as seen:
        await seen.stands({"a": ""})
        lists = seen.watch()["lists"]
        relay.part()
        await space.pod("b", "10.0.0.2")
        await space.delete("a", seconds=0)
        await plane.compact()
        await plane.kill_apiserver()
        await plane.start_apiserver()
        relay.cut()
        relay.heal()
        await seen.stands({"b": ""})

        watch = seen.watch()
        assert watch["errors"].get("410", 0) >= 1
        assert watch["lists"] > lists
        assert [sorted(e.name for e in fleet) for fleet in seen.fleets] == [["a"], ["b"]]


async def test_a_cut_watch_goes_on_where_it_was(
    plane: ControlPlane, space: Namespace, relay: TcpRelay
) -> None:
    """A broken connection costs no list: the next watch begins at the last version received."""
    await space.pod("a", "10.0.0.1")
    way = plane.kubeconfig("relayed", server=f"https://{relay.address}")
    async with following(way, space) as seen:
        await seen.stands({"a": ""})
        for number in range(3):
            taken = relay.connections
            relay.cut()
            await space.status("a", ready=bool(number % 2))
            await seen.stands({"a": "" if number % 2 else "not ready"})
            assert relay.connections > taken
        assert seen.watch()["lists"] == 1
        assert set(seen.watch()["errors"]) == {"connection"}


async def test_a_half_open_watch_is_noticed(plane: ControlPlane, space: Namespace, relay: TcpRelay) -> None:
    """A network that swallows everything breaks no connection; silence does, and the fleet stands
    meanwhile."""
    await space.pod("a", "10.0.0.1")
    way = plane.kubeconfig("relayed", server=f"https://{relay.address}")
    async with following(way, space, times=LIVELY) as seen:
        await seen.stands({"a": ""})
        relay.part()
        await seen.until(lambda: "does not answer in time" in seen.discovery.problem)
        assert [len(fleet) for fleet in seen.fleets] == [1]

        await space.pod("b", "10.0.0.2")
        relay.cut()
        relay.heal()
        await seen.stands({"a": "", "b": ""})
        assert seen.discovery.problem == ""


async def test_watches_end_and_go_on(plane: ControlPlane, space: Namespace) -> None:
    """The server ends a watch when its time is over; the next one goes on, and a list is due now and then."""
    await space.pod("a", "10.0.0.1")
    async with following(
        plane.kubeconfig("admin"), space, times=InformerTimes(resync=3.0, watch=1.0)
    ) as seen:
        await seen.until(lambda: seen.watch()["lists"] >= 2 if seen.fleets else False)
        await space.status("a", ready=False)
        await seen.stands({"a": "not ready"})
        assert (seen.watch()["errors"], seen.discovery.problem) == ({}, "")
        assert len(seen.fleets) == 2


async def test_bookmarks_move_the_version_on(plane: ControlPlane, space: Namespace, relay: TcpRelay) -> None:
    """A watch without changes gets bookmarks with the cluster's version, the last one shortly before it
    ends."""
    await space.pod("a", "10.0.0.1")
    async with following(plane.kubeconfig("admin"), space, times=InformerTimes(watch=6.0)) as seen:
        await seen.stands({"a": ""})
        before = int(seen.watch()["resource_version"])
        await space.pod("stranger", "10.0.0.9", labels={"app": "other"})
        await seen.until(lambda: seen.watch()["bookmarks"] >= 1 and watched(seen) > before)
        assert seen.watch()["changes"] == 1


def watched(seen: Seen) -> int:
    """The version that the next watch would begin at."""
    return int(seen.watch()["resource_version"])
