"""Reference of the HTTP pages that picker and operator serve."""

from typing import Final

from tests.reference.markdown import code, page, prose, table

from kvist_epp.admin import admin_server
from kvist_epp.admin.admin_server import CONTENTS, RolePages
from kvist_epp.telemetry.metrics import MetricsPage
from kvist_operator.process.observability import PAGES

HEAD: Final = ("page", "content")


def http_pages() -> str:
    """Return the page of the HTTP pages."""
    return page(
        "HTTP pages",
        "kvist_epp.admin.admin_server and kvist_operator.process.observability",
        "Pages are JSON, except `/metrics`, `/healthz`, `/readyz` and `/ca.crt`. Prompt text is on none "
        "of them. The ports are plaintext and have no "
        "authentication: open them only to those who may read (NetworkPolicies of the chart and of pools "
        "do that).",
        "## Picker",
        "On `--metrics-port` (9090) of kvist-epp. `GET /debug` lists them.",
        _rows(CONTENTS),
        "## Model-header filter",
        "On `--metrics-port` of kvist-epp with `--role=model-header`.",
        _rows({path: CONTENTS[path] for path in _role_paths()}),
        "## Operator",
        "On `--metrics-port` (9095) of kvist-operator.",
        _rows(PAGES),
    )


def _role_paths() -> list[str]:
    """Return the paths that every role of kvist-epp serves."""
    pages = RolePages(metrics=lambda: MetricsPage([]), not_ready=str)
    return [route.path for route in admin_server._role_routes(pages)]


def _rows(pages: dict[str, str]) -> str:
    return table(HEAD, ((code(path), prose(text)) for path, text in pages.items()))
