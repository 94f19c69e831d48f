"""Alerts about what pickers know: ends of requests, the index, the tokenizer, certificates, the gateway."""

from typing import Final

from monitoring.rules import Alert, Case, Group

_POOL: Final = 'namespace="a",pool="p"'
_PICKER: Final = f'{_POOL},pod="p-epp-1"'
_OTHER: Final = f'{_POOL},pod="p-epp-2"'
_LABELS: Final = {"namespace": "a", "pool": "p"}
_POD: Final = {**_LABELS, "pod": "p-epp-1"}
_ENDPOINT: Final = "10.0.0.1:8000"
_RESETS: Final = f'kvist_epp_index_resets_total{{{_PICKER},endpoint="{_ENDPOINT}"}}'
_PLACE: Final = "pool {{ $labels.namespace }}/{{ $labels.pool }}"


def _picks(per_minute: int, minutes: int = 60) -> dict[str, str]:
    return {f'kvist_epp_requests_total{{{_PICKER},outcome="picked"}}': f"0+{per_minute}x{minutes}"}


ACCESS_LOG_MISSING: Final = Alert(
    name="KvistAccessLogMissing",
    severity="warning",
    expr="""
    max by (namespace, pool) (kvist_epp_ends_reported) == 0
    and on (namespace, pool)
    sum by (namespace, pool) (increase(kvist_epp_requests_total{outcome="picked"}[10m])) >= 20
    """,
    wait="5m",
    summary=f"no gateway reports to the picker of {_PLACE} how requests end",
    description="Without the access log, load follows what scrapes show, seconds late: endpoints that answer "
    "fast get fewer requests than they could serve.",
    meaning="pickers get requests, but no access log and no responses",
    cases=(
        Case(
            "traffic, and no reports",
            {**_picks(60), f"kvist_epp_ends_reported{{{_PICKER}}}": "0x60"},
            at="30m",
            fires=_LABELS,
            summary="no gateway reports to the picker of pool a/p how requests end",
        ),
        Case("reports", {**_picks(60), f"kvist_epp_ends_reported{{{_PICKER}}}": "1x60"}, at="30m"),
        Case("no traffic", {**_picks(0), f"kvist_epp_ends_reported{{{_PICKER}}}": "0x60"}, at="30m"),
    ),
)

INDEX_INACCURATE: Final = Alert(
    name="KvistIndexInaccurate",
    severity="warning",
    expr="""
    max by (namespace, pool, endpoint) (kvist_epp_index_trust) == 0
    unless on (namespace, pool) max by (namespace, pool) (kvist_epp_model_faithful) == 0
    """,
    wait="10m",
    summary=f"endpoint {{{{ $labels.endpoint }}}} of {_PLACE} is picked by routing history",
    description="The picker does not trust the index of this endpoint: its KV events are missing, "
    "incomplete, or disagree with the hits that the engine reports.",
    meaning="an endpoint is in approximate mode, while the tokenizer is in order",
    cases=(
        Case(
            "one of two endpoints",
            {
                f'kvist_epp_index_trust{{{_PICKER},endpoint="{_ENDPOINT}"}}': "1x5 0x30",
                f'kvist_epp_index_trust{{{_PICKER},endpoint="10.0.0.2:8000"}}': "1x35",
                f"kvist_epp_model_faithful{{{_PICKER}}}": "1x35",
            },
            at="25m",
            fires={**_LABELS, "endpoint": _ENDPOINT},
            summary=f"endpoint {_ENDPOINT} of pool a/p is picked by routing history",
        ),
        Case(
            "an engine that has just started",
            {
                f'kvist_epp_index_trust{{{_PICKER},endpoint="{_ENDPOINT}"}}': "0x5 1x30",
                f"kvist_epp_model_faithful{{{_PICKER}}}": "1x35",
            },
            at="12m",
        ),
        Case(
            "no tokenizer, which has an alert of its own",
            {
                f'kvist_epp_index_trust{{{_PICKER},endpoint="{_ENDPOINT}"}}': "0x35",
                f"kvist_epp_model_faithful{{{_PICKER}}}": "0x35",
            },
            at="25m",
        ),
    ),
)

TOKENIZER_UNUSABLE: Final = Alert(
    name="KvistTokenizerUnusable",
    severity="warning",
    expr="""
    min by (namespace, pool, pod) (kvist_epp_model_faithful) == 0
    and on (namespace, pool, pod) count by (namespace, pool, pod) (kvist_epp_index_trust) > 0
    """,
    wait="10m",
    summary=f"picker {{{{ $labels.pod }}}} of {_PLACE} has no tokenizer that it can use",
    description="All endpoints are in approximate mode: the tokenizer could not be downloaded, --model is "
    "not set, or the tokenizer does not decode to exact bytes.",
    meaning="a picker matches prefixes, but has no faithful tokenizer",
    cases=(
        Case(
            "the download failed",
            {
                f"kvist_epp_model_faithful{{{_PICKER}}}": "0x35",
                f'kvist_epp_index_trust{{{_PICKER},endpoint="{_ENDPOINT}"}}': "0x35",
            },
            at="25m",
            fires=_POD,
            summary="picker p-epp-1 of pool a/p has no tokenizer that it can use",
        ),
        Case(
            "routing by load on purpose (--prefix-matching=false)",
            {f"kvist_epp_model_faithful{{{_PICKER}}}": "0x35"},
            at="25m",
        ),
    ),
)

INDEX_RESETS: Final = Alert(
    name="KvistIndexResets",
    severity="warning",
    expr="""
    max by (namespace, pool, endpoint) (round(increase(kvist_epp_index_resets_total[1h]))) > 3 # threshold
    """,
    wait="0m",
    summary=f"the index of {{{{ $labels.endpoint }}}} ({_PLACE}) was dropped "
    '{{ $value | printf "%.0f" }} times in an hour',
    description="The engine restarts again and again, or the picker loses events that the engine does not "
    "keep for replay. Between a reset and the end of the replay nothing is known of this cache.",
    meaning="the index of an endpoint was dropped more than three times in an hour",
    cases=(
        Case(
            "a crash loop",
            {_RESETS: "0x10 1x9 2x9 3x9 4x9 5x9 6x30"},
            at="65m",
            fires={**_LABELS, "endpoint": _ENDPOINT},
            summary=f"the index of {_ENDPOINT} (pool a/p) was dropped 6 times in an hour",
        ),
        Case(
            "three restarts, which the increase overstates a little",
            {_RESETS: "0x20 1x9 2x9 3x40"},
            at="70m",
        ),
    ),
)

PICKS_NOT_FOLLOWED: Final = Alert(
    name="KvistPicksNotFollowed",
    severity="warning",
    expr="""
    sum by (namespace, pool) (rate(kvist_epp_served_elsewhere_total[15m]))
    / (sum by (namespace, pool) (rate(kvist_epp_requests_total{outcome="picked"}[15m])) > 0)
    > 0.05 # threshold
    and on (namespace, pool) sum by (namespace, pool) (increase(kvist_epp_served_elsewhere_total[15m])) >= 5
    """,
    wait="10m",
    summary="the gateway serves {{ $value | humanizePercentage }} of the requests of "
    f"{_PLACE} elsewhere than picked",
    description="Connections to the picked endpoints fail, or the gateway does not know them, or it ignores "
    "the picker's answer. These requests find no cached prefix.",
    meaning="more than 5 % of picked requests were served by another endpoint",
    cases=(
        Case(
            "a fifth",
            {
                **_picks(50),
                f'kvist_epp_served_elsewhere_total{{{_PICKER},endpoint="{_ENDPOINT}"}}': "0+10x60",
            },
            at="40m",
            fires=_LABELS,
            summary="the gateway serves 20% of the requests of pool a/p elsewhere than picked",
        ),
        Case(
            "a few retries",
            {
                **_picks(1000),
                f'kvist_epp_served_elsewhere_total{{{_PICKER},endpoint="{_ENDPOINT}"}}': "0+1x60",
            },
            at="40m",
        ),
    ),
)

_ENVOY: Final = f'{_POOL},pod="p-envoy-1",envoy_http_conn_manager_prefix="inference"'
_ASKED: Final = f"envoy_http_downstream_rq_total{{{_ENVOY}}}"
_ALLOWED: Final = f"envoy_http_ext_proc_failure_mode_allowed{{{_ENVOY}}}"

GATEWAY_WITHOUT_PICKER: Final = Alert(
    name="KvistGatewayWithoutPicker",
    severity="warning",
    expr="""
    sum by (namespace, pool) (rate(envoy_http_ext_proc_failure_mode_allowed{pool!=""}[10m]))
    / (
      sum by (namespace, pool)
      (rate(envoy_http_downstream_rq_total{pool!="",envoy_http_conn_manager_prefix="inference"}[10m])) > 0
    )
    > 0.01 # threshold
    """,
    wait="3m",
    summary=f"Envoy routes {{{{ $value | humanizePercentage }}}} of the requests of {_PLACE} without a pick",
    description="The picker does not answer Envoy, which sends these requests to any endpoint "
    "(failureMode FailOpen).",
    meaning="the pool's own Envoy routes more than 1 % of requests without an answer of the picker",
    cases=(
        Case(
            "a tenth",
            {
                _ASKED: "0+100x60",
                _ALLOWED: "0+10x60",
            },
            at="30m",
            fires=_LABELS,
            summary="Envoy routes 10% of the requests of pool a/p without a pick",
        ),
        Case(
            "none",
            {
                _ASKED: "0+100x60",
                _ALLOWED: "0x60",
            },
            at="30m",
        ),
        Case(
            "an idle gateway",
            {
                _ASKED: "5x60",
                _ALLOWED: "5x60",
            },
            at="30m",
        ),
    ),
)

PROTOCOL_ERRORS: Final = Alert(
    name="KvistProtocolErrors",
    severity="warning",
    expr="""
    sum by (namespace, pool, kind) (increase(kvist_epp_protocol_errors_total[15m])) >= 5
    """,
    wait="5m",
    summary=f"picker of {_PLACE}: "
    '{{ $value | printf "%.0f" }} errors of kind {{ $labels.kind }} in 15 minutes',
    description="The picker cannot read messages of the gateway, or picks fail. The log has the reason.",
    meaning="five or more gateway messages that could not be read, or failed picks, in 15 minutes",
    cases=(
        Case(
            "an error a minute",
            {f'kvist_epp_protocol_errors_total{{{_PICKER},kind="body"}}': "0+1x60"},
            at="40m",
            fires={**_LABELS, "kind": "body"},
            summary="picker of pool a/p: 15 errors of kind body in 15 minutes",
        ),
        Case(
            "one error",
            {f'kvist_epp_protocol_errors_total{{{_PICKER},kind="body"}}': "0x20 1x40"},
            at="30m",
        ),
    ),
)

CERTIFICATE_EXPIRES: Final = Alert(
    name="KvistCertificateExpires",
    severity="warning",
    expr="""
    (min by (namespace, pool, pod) (kvist_epp_certificate_expiry_timestamp_seconds) - time()) / 86400
    < 7 # threshold
    """,
    wait="15m",
    summary=f"the certificate of picker {{{{ $labels.pod }}}} ({_PLACE}) expires in "
    '{{ $value | printf "%.1f" }} days',
    description="Operator, cert-manager and the picker itself all renew earlier than that, so renewal has "
    "failed. When it expires, gateways that verify it cannot connect.",
    meaning="a picker's certificate expires in less than 7 days",
    cases=(
        Case(
            "in three days",
            {f"kvist_epp_certificate_expiry_timestamp_seconds{{{_PICKER}}}": f"{3 * 86400 + 1800}x60"},
            at="30m",
            fires=_POD,
            summary="the certificate of picker p-epp-1 (pool a/p) expires in 3.0 days",
        ),
        Case(
            "in a month",
            {f"kvist_epp_certificate_expiry_timestamp_seconds{{{_PICKER}}}": f"{30 * 86400}x60"},
            at="30m",
        ),
    ),
)

CERTIFICATE_REFUSED: Final = Alert(
    name="KvistCertificateRefused",
    severity="warning",
    expr="""
    max by (namespace, pool, pod) (increase(kvist_epp_certificate_changes_total{outcome="refused"}[1h])) > 0
    """,
    wait="0m",
    summary=f"picker {{{{ $labels.pod }}}} of {_PLACE} cannot use its new certificate",
    description="The files changed, but certificate, key and authority do not fit together. The picker "
    "continues with the old certificate until that expires; /readyz says why.",
    meaning="a picker could not use a new certificate within the last hour",
    cases=(
        Case(
            "the key of another certificate",
            {f'kvist_epp_certificate_changes_total{{{_PICKER},outcome="refused"}}': "0x20 1x40"},
            at="30m",
            fires=_POD,
            summary="picker p-epp-1 of pool a/p cannot use its new certificate",
        ),
        Case(
            "a new certificate that is in use",
            {
                f'kvist_epp_certificate_changes_total{{{_PICKER},outcome="refused"}}': "0x60",
                f'kvist_epp_certificate_changes_total{{{_PICKER},outcome="taken"}}': "1x20 2x40",
            },
            at="30m",
        ),
    ),
)

ACCURACY: Final = Group(
    "kvist-accuracy",
    alerts=(
        ACCESS_LOG_MISSING,
        INDEX_INACCURATE,
        TOKENIZER_UNUSABLE,
        INDEX_RESETS,
        PICKS_NOT_FOLLOWED,
        GATEWAY_WITHOUT_PICKER,
        PROTOCOL_ERRORS,
        CERTIFICATE_EXPIRES,
        CERTIFICATE_REFUSED,
    ),
)
