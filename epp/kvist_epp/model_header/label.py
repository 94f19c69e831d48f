"""From a request to the header that names its model: the whole policy of the role. Pure but for the clock."""

from collections.abc import Mapping
from time import perf_counter
from typing import Final

from kvist_epp.extproc import rewrite
from kvist_epp.extproc.pick_request import PickRequest, PickResult
from kvist_epp.model_header.find import header_value, model_of
from kvist_epp.model_header.metrics import HeaderMetrics
from kvist_epp.names import BASE_MODEL_HEADER, MODEL_HEADER, REQUEST_ID_HEADER
from kvist_epp.telemetry.request_log import RequestLine, RequestLog

LABELS: Final = (MODEL_HEADER, BASE_MODEL_HEADER)
"""Headers that no client may set."""


class Labeller:
    """Answers each request with its header, counts it, writes its line."""

    def __init__(self, base_models: Mapping[str, str], metrics: HeaderMetrics, log: RequestLog) -> None:
        """``base_models``: adapter → the model under it."""
        self._bases = {base: base for base in base_models.values()} | dict(base_models)
        self._metrics = metrics
        self._log = log

    def decide(self, ask: PickRequest) -> PickResult:
        """The headers to set, and those of the client's to take away. Refuses nothing."""
        begun = perf_counter()
        name, outcome = _named(ask)
        labels = self._labels(name)
        forged = tuple([label for label in LABELS if label in ask.headers])
        remove = tuple([label for label in forged if label not in labels]) if forged else ()
        seconds = perf_counter() - begun
        self._metrics.count(outcome, seconds, forged=bool(forged))
        if self._log.enabled:
            self._log.write(_line(ask, name, outcome, seconds))
        return PickResult((), tuple(labels.items()), remove=remove)

    def _labels(self, name: str | None) -> dict[str, str]:
        if name is None or (value := header_value(name)) is None:
            return {}
        base = header_value(self._bases.get(name))
        return {MODEL_HEADER: value} if base is None else {MODEL_HEADER: value, BASE_MODEL_HEADER: base}


def _named(ask: PickRequest) -> tuple[str | None, str]:
    """The model that the engine will be asked for, if a header can say it; and what became of the request.

    The name that a rewriting header asks for goes before the body's, as in the picker behind.
    """
    if ask.partial:
        return None, "partial"  # a later key would win: what was not seen cannot be answered for
    if not ask.body:
        return None, "no-body"
    found = model_of(ask.body)
    if found is None:
        return None, "no-model"
    name = rewrite.wanted(ask.headers) or found
    return (str(name), "named") if header_value(name) is not None else (None, "unusable")


def _line(ask: PickRequest, name: str | None, outcome: str, seconds: float) -> RequestLine:
    return RequestLine(
        id=ask.headers.get(REQUEST_ID_HEADER, ""),
        session="",
        path=ask.path,
        kind="model-header",
        outcome=outcome,
        model=name,
        us={"find": round(seconds * 1e6)},
    )
