"""Requests and faults with prefill and decode on two real engines: ``make bench-pd``.

    .venv/bin/python -m tests.engine.disaggregation_bench [NAME …]

Runs all trials, or those that are named, and prints for each how long it took, the time of the slowest
answer beside the bound that is stated for it, and what has failed. A bound holds on a machine that does
nothing else, so that an answer that was slower is shown, and is no failure.
"""

import asyncio
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

from tests.engine import disaggregation_faults as faults
from tests.engine.disaggregation_faults import Fault, Trial
from tests.engine.disaggregation_mix import KINDS, compare, requests
from tests.engine.disaggregation_rollout import a_rolling_update, engines_whose_labels_lie
from tests.engine.disaggregation_tiers import both_connectors
from tests.engine.prefill_decode import FALLBACKS, SPLIT, TRANSFERRED, WARM, PrefillDecode

REQUESTS, TOGETHER = 300, 40


async def mixed_requests(trial: Trial) -> None:
    """300 mixed requests have the text, the logprobs and the usage of a lone engine, and all are split;
    the index of both engines stays trusted."""
    await _mixed(trial, REQUESTS)


async def mixed_requests_four_at_a_time(trial: Trial) -> None:
    """Forty more requests, four at a time, have the lone engine's answers, too."""
    await compare(trial, requests(trial.pool, TOGETHER), at_once=4)


async def observed_responses(trial: Trial) -> None:
    """With --observe-responses and responses that Envoy shows the picker, usage and answers are the same, the
    picker counts the tokens that clients see, and its index stays trusted."""
    pool = trial.pool
    await pool.replace_picker("--observe-responses", responses="streamed")
    listed = requests(pool, REQUESTS)
    await compare(trial, listed)
    with_usage = sum("streamed" not in request.kinds for request in listed)
    await pool.until(r'kvist_epp_observed_responses_total\{outcome="usage"\}', with_usage)
    assert await pool.is_trusted(), await pool.series("kvist_epp_index_trust.*")
    await pool.replace_picker(responses=None)


async def _mixed(trial: Trial, count: int) -> None:
    pool = trial.pool
    received, split = await pool.counted(TRANSFERRED, 1), await pool.counted(SPLIT)
    found = await compare(trial, requests(pool, count))
    assert set(found) == KINDS, KINDS - set(found)
    sys.stdout.write("  " + ", ".join(f"{number} {kind}" for kind, number in sorted(found.items())) + "\n")
    fallbacks = await pool.counted(FALLBACKS % ".*")
    received = await pool.counted(TRANSFERRED, 1) - received
    split = await pool.counted(SPLIT) - split
    sys.stdout.write(f"  {split:.0f} split, {fallbacks:.0f} fallbacks, {received:.0f} tokens transferred\n")
    assert split == count
    assert received > count * 100
    assert await pool.is_trusted(), await pool.series("kvist_epp_index_trust.*")


ANSWER = "an answer of 8 tokens, prefill included"
ENGINE = "the time of an answer; the engine that dies is noticed at once"
FAULTS: tuple[Fault, ...] = (
    Fault(mixed_requests, 5, ANSWER),
    Fault(mixed_requests_four_at_a_time, 5, ANSWER),
    Fault(observed_responses, 5, ANSWER),
    Fault(faults.a_prompt_is_refused, 5, ANSWER),
    Fault(faults.roles_are_swapped, 5, ANSWER),
    Fault(faults.a_client_leaves_in_leg_1, 5, ANSWER),
    Fault(faults.the_port_is_wrong, 5, ANSWER),
    Fault(faults.peers_are_unreachable, 10, "NIXL's handshake gives up after 5 s; then a prefill"),
    Fault(faults.the_decode_engine_keeps_a_request_waiting, 30, "the engine's own queue, here 1.2 leases"),
    Fault(faults.leg_1_takes_too_long, 25, "time limit of leg 1 (20 s), then a prefill"),
    Fault(faults.picker_is_killed_in_leg_1, 5, "the gateway answers at once"),
    Fault(faults.picker_is_killed_between_the_legs, 5, "the gateway answers at once"),
    Fault(faults.prefill_engine_is_killed_between_the_legs, 10, "the decode engine's handshake, 5 s at most"),
    Fault(faults.prefill_engine_comes_back, 5, ANSWER),
    Fault(faults.prefill_engine_is_killed_before_leg_1, 5, "a connection that is refused, then a prefill"),
    Fault(faults.prefill_engine_is_gone, 5, ANSWER),
    Fault(faults.prefill_engine_comes_back, 5, ANSWER),
    Fault(faults.prefill_engine_is_killed_in_leg_1, 5, ENGINE),
    Fault(faults.prefill_engine_comes_back, 5, ANSWER),
    Fault(
        faults.decode_engine_is_killed_before_it_fetches,
        10,
        "the handshake of the retry, 5 s, then a prefill",
    ),
    Fault(faults.decode_engine_comes_back, 5, ANSWER),
    Fault(faults.decode_engine_is_killed_while_it_generates, 20, "the retry computes 600 tokens anew"),
    Fault(faults.decode_engine_comes_back, 5, ANSWER),
    Fault(a_rolling_update, 10, "the retry of a request on the engine that is killed"),
    Fault(engines_whose_labels_lie, 10, "NIXL's handshake is refused; then a prefill"),
    Fault(both_connectors, 5, ANSWER),
)


async def main(names: set[str]) -> int:
    """Run all trials, or those with these names; return the number of those that failed."""
    failed = 0
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)  # engines end with it
    with tempfile.TemporaryDirectory() as folder:
        async with PrefillDecode(Path(folder)) as pool:
            await pool.until(WARM, 1)
            for fault in FAULTS:
                if not names or fault.run.__name__ in names:
                    failed += not await report(fault, Trial(pool))
    return failed


async def report(fault: Fault, trial: Trial) -> bool:
    """Run one trial, print what came of it, and return whether its promise held."""
    started, outcome, why = time.monotonic(), "ok", ""
    try:
        async with asyncio.timeout(900):
            await fault.run(trial)
    except (Exception, ExceptionGroup) as error:  # noqa: BLE001  the others are tried, too
        outcome, why = "FAILED", "".join(traceback.format_exception(error)) + trial.pool.picker.tail() + "\n"
    name = fault.run.__name__.replace("_", " ")
    slow = "" if trial.slowest <= fault.seconds else " EXCEEDED"
    sys.stdout.write(
        f"{name:58} {outcome:6} {time.monotonic() - started:6.1f} s; slowest answer {trial.slowest:5.1f} s "
        f"(bound {fault.seconds:g} s{slow}: {fault.why})\n{why}"
    )
    sys.stdout.flush()
    return outcome == "ok"


if __name__ == "__main__":
    sys.exit(asyncio.run(main(set(sys.argv[1:]))))
