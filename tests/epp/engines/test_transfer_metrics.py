"""Rates at which engines receive blocks of others, by vLLM's metrics of NIXL."""

import pytest

from kvist_epp.engines.vllm.engine_metrics import parse_metrics
from kvist_epp.engines.vllm.transfer_metrics import NO_TRANSFERS, TransferCounters, TransferRateEstimator

PAGE = """
vllm:num_requests_running{engine="0"} 1
vllm:nixl_xfer_time_seconds_sum{engine="0"} 0.5
vllm:nixl_bytes_transferred_sum{engine="0"} 1000000
vllm:prompt_tokens_by_source_total{engine="0",source="external_kv_transfer"} 8000
vllm:prompt_tokens_by_source_total{engine="0",source="local_compute"} 70
"""


def test_the_page_is_read() -> None:
    """Sums of the histograms and the received tokens are read; an engine without them has none."""
    assert parse_metrics(PAGE).transfers == TransferCounters(0.5, 1_000_000.0, 8000.0)
    assert parse_metrics('vllm:num_requests_running{engine="0"} 1').transfers is NO_TRANSFERS


def test_the_rate_is_that_of_recent_transfers() -> None:
    """Tokens by seconds, once enough were received; a restart begins anew."""
    estimator = TransferRateEstimator()
    estimator.observe(NO_TRANSFERS)
    assert estimator.rate is None
    estimator.observe(TransferCounters(0.1, 100.0, 1000.0))
    assert estimator.rate is None, "too few tokens"
    estimator.observe(TransferCounters(0.5, 900.0, 9000.0))
    assert estimator.rate == pytest.approx(8800 / 0.48)

    estimator.observe(TransferCounters(0.1, 100.0, 1000.0))
    assert estimator.rate == pytest.approx(8800 / 0.48), "the engine has restarted"


def test_bytes_stand_for_tokens_that_are_not_counted() -> None:
    """The bytes of a token tell how many tokens came where tokens are not counted any more."""
    estimator = TransferRateEstimator()
    estimator.observe(NO_TRANSFERS)
    estimator.observe(TransferCounters(1.0, 40_000.0, 4000.0))
    estimator.observe(TransferCounters(2.0, 120_000.0, 4000.0))

    assert estimator.rate == pytest.approx((0.8 * 4000 + 8000) / 1.8)


def test_without_tokens_nothing_is_learned() -> None:
    """An engine that counts no received tokens keeps the default."""
    estimator = TransferRateEstimator()
    estimator.observe(NO_TRANSFERS)
    estimator.observe(TransferCounters(5.0, 9e9, 0.0))

    assert estimator.rate is None
