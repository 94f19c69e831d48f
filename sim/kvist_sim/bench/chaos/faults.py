"""Faults of a chaos run, one function each: the action on the stack, and the observation.

A fault begins when its function is called and is over, everything restored, when it returns; that must
be well within the 30 seconds after which the prediction is judged.
"""

import asyncio
import signal
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from kvist_sim.bench.harness.stack import FIRST_ENGINE, Setup, Stack
from kvist_sim.launch import HOST, metric

Say = Callable[[str], None]
"""Records a step with the present time."""
Fault = Callable[[Stack, Say], Awaitable[None]]

DOWN_SECONDS: Final = 4.0
"""Seconds for which a killed process stays down."""
MISCHIEF_SECONDS: Final = 10.0
DROP_SHARE: Final = 0.05
SWAP_SHARE: Final = 0.05
BURST: Final = 100
"""Further messages in a row that the subscribers of one engine lose."""
PARTITION_SECONDS: Final = 15.0
HEARING_SECONDS: Final = 5.0
"""Seconds after the fault until the replicas' view of each other is read."""
HEARD: Final = 'state="heard"'
ROTATION_SECONDS: Final = 12.0
"""Longest wait for a rotated certificate to be served."""


async def quiet(_: Stack, say: Say) -> None:
    """Apply no fault: the baseline."""
    say("nothing is done")


async def engine_killed(stack: Stack, say: Say) -> None:
    """Kill one engine and start it again."""
    engine = stack.engines[FIRST_ENGINE]
    say(f"{engine.name} SIGKILL")
    await stack.kill_engine(engine.number)
    await asyncio.sleep(DOWN_SECONDS)
    await stack.start_engine(engine.number)
    say(f"{engine.name} healthy again")


async def picker_killed(stack: Stack, say: Say) -> None:
    """Kill one picker of three and start it again."""
    say("picker-0 SIGKILL")
    await stack.end_picker(0, signal.SIGKILL)
    await asyncio.sleep(DOWN_SECONDS)
    await stack.start_picker(0)
    say("picker-0 ready again")


async def picker_ended(stack: Stack, say: Say) -> None:
    """Send SIGTERM to one picker of three, as a rollout does, and start it again."""
    await _rolled(stack, 1, say)


async def all_pickers_rolled(stack: Stack, say: Say) -> None:
    """Restart one picker after the other, as a rollout does."""
    for picker in stack.pickers:
        await _rolled(stack, picker.number, say)


async def _rolled(stack: Stack, number: int, say: Say) -> None:
    say(f"picker-{number} SIGTERM")
    status = await stack.end_picker(number, signal.SIGTERM)
    say(f"picker-{number} gone, exit code {status}")
    await stack.start_picker(number)
    say(f"picker-{number} ready again")


async def events_lost(stack: Stack, say: Say) -> None:
    """Drop and reorder event messages, for all pickers, of all engines but the first."""
    before = sum(relay.passed for relay in stack.relays)
    for relay in stack.relays:
        relay.faults.begin(drop=DROP_SHARE, swap=SWAP_SHARE)
    stack.relays[0].faults.begin(drop=DROP_SHARE, swap=SWAP_SHARE, burst=BURST)
    say(f"{DROP_SHARE:.0%} of event messages dropped, {SWAP_SHARE:.0%} swapped, {BURST} in a row besides")
    await asyncio.sleep(MISCHIEF_SECONDS)
    for relay in stack.relays:
        relay.faults.end()
    dropped, swapped = (sum(getattr(r.faults, name) for r in stack.relays) for name in ("dropped", "swapped"))
    passed = sum(relay.passed for relay in stack.relays) - before
    say(f"events pass again: {dropped} of {passed} were dropped, {swapped} overtaken")
    say(f"gaps seen by the pickers so far: {await _metrics(stack, 'kvist_epp_index_gaps_total')}")


async def pickers_parted(stack: Stack, say: Say) -> None:
    """Separate the first picker from the others; engines and Envoy still reach it."""
    cut = [relay for ends, relay in stack.links.items() if 0 in ends]
    for relay in cut:
        relay.part()
    say(f"picker-0 parted from its peers ({len(cut)} links)")
    await asyncio.sleep(PARTITION_SECONDS)
    say(f"replicas that each picker follows: {await _metrics(stack, 'kvist_epp_peers', HEARD)}")
    for relay in cut:
        relay.heal()
    say("links pass again")
    await asyncio.sleep(HEARING_SECONDS)
    say(f"replicas that each picker follows: {await _metrics(stack, 'kvist_epp_peers', HEARD)}")


async def certificates_rotated(stack: Stack, say: Say) -> None:
    """Give every picker a new certificate and key, as a mounted Secret changes."""
    assert stack.secrets is not None
    fresh = {picker.number: stack.secrets.rotate(picker.name) for picker in stack.pickers}
    say(f"{len(fresh)} certificates replaced on disk")
    async with asyncio.timeout(ROTATION_SECONDS):
        for picker in stack.pickers:
            await _until_served(picker.ports.grpc, fresh[picker.number])
    say("all pickers serve the new ones")


async def _until_served(port: int, certificate: bytes) -> None:
    while await _served(port) != certificate:  # noqa: ASYNC110  another process changes it
        await asyncio.sleep(0.1)


async def _served(port: int) -> bytes | None:
    """Return the certificate that a new connection receives, in DER."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    _, writer = await asyncio.open_connection(HOST, port, ssl=context)
    try:
        found: ssl.SSLObject = writer.get_extra_info("ssl_object")
        return found.getpeercert(binary_form=True)
    finally:
        writer.transport.abort()


async def _metrics(stack: Stack, name: str, label: str = "") -> str:
    """One number for each picker, in words."""
    running = [picker.running for picker in stack.pickers if picker.running is not None]
    return ", ".join([f"{await metric(picker, name, label):.0f}" for picker in running])


@dataclass(frozen=True, slots=True)
class Scene:
    """One phase of the run: a name and a fault."""

    name: str
    fault: Fault
    needs: Callable[[Setup], bool] = lambda _: True


SCENES: Final = (
    Scene("quiet", quiet),
    Scene("engine killed", engine_killed),
    Scene("picker killed", picker_killed),
    Scene("picker ended", picker_ended),
    Scene("pickers rolled", all_pickers_rolled),
    Scene("events lost", events_lost),
    Scene("pickers parted", pickers_parted, lambda setup: setup.peers),
    Scene("certificates", certificates_rotated, lambda setup: setup.tls),
)
ELSEWHERE: Final = {"API watch cut": "make test-cluster: it needs a real Kubernetes API server"}
"""Faults that this command cannot make, with the command that does."""
