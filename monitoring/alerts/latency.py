"""Alerts about latency at the engines: time to the first token, time per output token."""

from typing import Final

from monitoring.rules import Alert, Case, Group, Record

_POOL: Final = 'namespace="a",pool="p"'
_ENGINE: Final = f'{_POOL},pod="p-1",instance="10.0.0.1:8000"'
_LABELS: Final = {"namespace": "a", "pool": "p"}

FIRST_TOKEN: Final = "namespace_pool:kvist_time_to_first_token_seconds:p90_10m"
OUTPUT_TOKEN: Final = "namespace_pool:kvist_time_per_output_token_seconds:mean10m"
WAITING: Final = "namespace_pool:kvist_waiting_requests:mean10m"
QUEUED_FIRST_TOKEN: Final = "namespace_pool:kvist_queue_and_first_token_seconds:sum10m"

RECORDS: Final = (
    Record(
        FIRST_TOKEN,
        """
        histogram_quantile(0.9,
          sum by (namespace, pool, le) (rate(vllm:time_to_first_token_seconds_bucket{pool!=""}[10m]))
        ) >= 0
        """,
        "time to the first token that nine of ten requests did not exceed at the engines",
    ),
    Record(
        OUTPUT_TOKEN,
        """
        sum by (namespace, pool) (rate(vllm:inter_token_latency_seconds_sum{pool!=""}[10m]))
        / (sum by (namespace, pool) (rate(vllm:inter_token_latency_seconds_count{pool!=""}[10m])) > 0)
        """,
        "mean time between two output tokens",
    ),
    Record(
        WAITING,
        """
        sum by (namespace, pool) (avg_over_time(vllm:num_requests_waiting{pool!=""}[10m]))
        + (
          sum by (namespace, pool) (avg_over_time(kvist_epp_queue_requests{pool!=""}[10m]))
          or 0 * sum by (namespace, pool) (avg_over_time(vllm:num_requests_waiting{pool!=""}[10m]))
        )
        """,
        "requests that wait in engines and pickers, on average over 10 minutes",
    ),
    Record(
        QUEUED_FIRST_TOKEN,
        f"""
        {FIRST_TOKEN}
        + on (namespace, pool) (
          sum by (namespace, pool) (rate(kvist_epp_queue_seconds_sum{{pool!=""}}[10m]))
          / (sum by (namespace, pool) (rate(kvist_epp_requests_total{{pool!=""}}[10m])) > 0)
          or 0 * {FIRST_TOKEN}
        )
        """,
        "time to the first token at the engines (p90) and in the pickers' queues before (mean)",
    ),
)


def _first_tokens(per_minute: str) -> dict[str, str]:
    """Return a histogram of times to the first token; ``per_minute``: samples of the counts up to 1 s and in
    all."""
    fast, total = per_minute.split("/")
    name = "vllm:time_to_first_token_seconds_bucket"
    return {
        f'{name}{{{_ENGINE},le="0.5"}}': fast,
        f'{name}{{{_ENGINE},le="2.5"}}': total,
        f'{name}{{{_ENGINE},le="+Inf"}}': total,
    }


_SLOWER: Final = _first_tokens("0+60x120 7200+6x60/0+60x180")
"""Nine of ten within 0.45 s for two hours, then more than 2 s."""

FIRST_TOKEN_RISING: Final = Alert(
    name="KvistTimeToFirstTokenRising",
    severity="warning",
    expr=f"""
    {QUEUED_FIRST_TOKEN} / ({QUEUED_FIRST_TOKEN} offset 1h > 0)
    > 2 # threshold
    and on (namespace, pool) {WAITING} > 2 * ({WAITING} offset 1h)
    and on (namespace, pool) {WAITING} > 1
    """,
    wait="10m",
    summary="time to the first token of pool {{ $labels.namespace }}/{{ $labels.pool }} is "
    '{{ $value | printf "%.1f" }} times that of an hour ago, and more requests wait',
    description="Requests arrive faster than the pool computes their prompts: queues and the time to the "
    "first token grow together. Add replicas, or shed low priorities.",
    meaning="time to the first token (p90 at the engines, with the mean wait in pickers) twice that of an "
    "hour ago, and twice as many requests wait",
    cases=(
        Case(
            "slower, and requests wait",
            {**_SLOWER, f"vllm:num_requests_waiting{{{_ENGINE}}}": "0x120 8x60"},
            at="150m",
            fires=_LABELS,
            summary="time to the first token of pool a/p is 5.1 times that of an hour ago, "
            "and more requests wait",
        ),
        Case(
            "slower, and requests wait in the picker",
            {
                **_SLOWER,
                f"vllm:num_requests_waiting{{{_ENGINE}}}": "0x180",
                f'kvist_epp_queue_requests{{{_POOL},pod="p-epp-1",priority="0"}}': "0x120 8x60",
            },
            at="150m",
            fires=_LABELS,
            summary="time to the first token of pool a/p is 5.1 times that of an hour ago, "
            "and more requests wait",
        ),
        Case(
            "as fast as ever at the engines, because pickers hold the requests back",
            {
                **_first_tokens("0+60x180/0+60x180"),
                f"vllm:num_requests_waiting{{{_ENGINE}}}": "0x180",
                f'kvist_epp_queue_requests{{{_POOL},pod="p-epp-1",priority="0"}}': "0x120 8x60",
                f'kvist_epp_requests_total{{{_POOL},pod="p-epp-1",outcome="picked"}}': "0+60x180",
                f'kvist_epp_queue_seconds_sum{{{_POOL},pod="p-epp-1",outcome="picked"}}': "0x120 0+54x60",
            },
            at="150m",
            fires=_LABELS,
            summary="time to the first token of pool a/p is 3.0 times that of an hour ago, "
            "and more requests wait",
        ),
        Case(
            "slower by longer prompts, and no request waits",
            {**_SLOWER, f"vllm:num_requests_waiting{{{_ENGINE}}}": "0x180"},
            at="150m",
        ),
        Case(
            "as fast as ever under load",
            {**_first_tokens("0+60x180/0+60x180"), f"vllm:num_requests_waiting{{{_ENGINE}}}": "0x120 8x60"},
            at="150m",
        ),
    ),
)

FIRST_TOKEN_OVER_TARGET: Final = Alert(
    name="KvistTimeToFirstTokenOverTarget",
    severity="warning",
    expr=f"""
    {FIRST_TOKEN}
    / on (namespace, pool) (max by (namespace, pool) (kvist_operator_pool_ttft_target_seconds) > 0)
    > 1 # threshold
    """,
    wait="15m",
    summary="time to the first token of pool {{ $labels.namespace }}/{{ $labels.pool }} is "
    '{{ $value | printf "%.1f" }} times its target',
    description="More than one request in ten waits longer than spec.workload.ttftMilliseconds at the "
    "engines. Time in the picker's queue comes on top.",
    meaning="p90 of the time to the first token above `ttftMilliseconds`",
    cases=(
        Case(
            "twice the target",
            {**_first_tokens("0x60/0+60x60"), f"kvist_operator_pool_ttft_target_seconds{{{_POOL}}}": "1x60"},
            at="40m",
            fires=_LABELS,
            summary="time to the first token of pool a/p is 2.3 times its target",
        ),
        Case(
            "within the target",
            {**_first_tokens("0x60/0+60x60"), f"kvist_operator_pool_ttft_target_seconds{{{_POOL}}}": "3x60"},
            at="40m",
        ),
        Case("no target", _first_tokens("0x60/0+60x60"), at="40m"),
        Case(
            "an idle pool",
            {**_first_tokens("0x60/0x60"), f"kvist_operator_pool_ttft_target_seconds{{{_POOL}}}": "0.1x60"},
            at="40m",
        ),
    ),
)


def _gaps(seconds: float) -> dict[str, str]:
    """Return 600 output tokens a minute, so far apart."""
    return {
        f"vllm:inter_token_latency_seconds_sum{{{_ENGINE}}}": f"0+{600 * seconds:g}x60",
        f"vllm:inter_token_latency_seconds_count{{{_ENGINE}}}": "0+600x60",
    }


DECODE_OVER_TARGET: Final = Alert(
    name="KvistDecodeOverTarget",
    severity="warning",
    expr=f"""
    {OUTPUT_TOKEN}
    / on (namespace, pool) (max by (namespace, pool) (kvist_operator_pool_tpot_target_seconds) > 0)
    > 1 # threshold
    """,
    wait="15m",
    summary="time per output token of pool {{ $labels.namespace }}/{{ $labels.pool }} is "
    '{{ $value | printf "%.1f" }} times its target',
    description="The mean time between two output tokens exceeds spec.workload.tpotMilliseconds: batches are "
    "too large, or prefill runs between the decode steps.",
    meaning="mean time between two output tokens above `tpotMilliseconds`",
    cases=(
        Case(
            "twice the target",
            {**_gaps(0.08), f"kvist_operator_pool_tpot_target_seconds{{{_POOL}}}": "0.04x60"},
            at="40m",
            fires=_LABELS,
            summary="time per output token of pool a/p is 2.0 times its target",
        ),
        Case(
            "within the target",
            {**_gaps(0.03), f"kvist_operator_pool_tpot_target_seconds{{{_POOL}}}": "0.04x60"},
            at="40m",
        ),
        Case("no target", _gaps(5.0), at="40m"),
    ),
)

LATENCY: Final = Group(
    "kvist-latency", RECORDS, (FIRST_TOKEN_RISING, FIRST_TOKEN_OVER_TARGET, DECODE_OVER_TARGET)
)
