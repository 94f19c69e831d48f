"""Which requests the live page answers."""

import pytest

from kvist_epp.admin.live.request_origin import RequestOrigin

ORIGIN = RequestOrigin(("kvist.example.com",), ("picker-7c9d",))


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "localhost:9090",
        "127.0.0.1:9090",
        "10.1.2.3",
        "[::1]:9090",
        "[fd00::12]",
        "kvist.localhost:80",
        "picker-7c9d:9090",
        "qwen-picker.serving.svc:9090",
        "qwen-picker.serving.svc.cluster.local",
        "10-1-2-3.serving.pod.cluster.local",
        "kvist.example.com",
        "KVIST.example.com.:443",
    ],
)
def test_names_that_no_stranger_can_own_are_answered(host: str) -> None:
    """Addresses, localhost, this machine, Services of the cluster, and names of the setting."""
    assert ORIGIN.refusal({"Host": host}) is None


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:9090",
        "localhost.evil.example",
        "127.0.0.1.evil.example",
        "10.0.0.1.nip.io",
        "kvist.example.com.evil.example",
        "evil.svc.evil.example",
        "evil.dev",
        "other-picker",
        "[::1",
        "a@localhost.evil.example",
        "<script>",
    ],
)
def test_foreign_names_are_refused_with_the_remedy(host: str) -> None:
    """A domain that points at the picker (DNS rebinding) is answered 421, which names the setting."""
    refused = ORIGIN.refusal({"Host": host})

    assert refused is not None
    assert refused[0] == 421
    assert "--live-page-hosts" in refused[1]


@pytest.mark.parametrize(
    ("host", "origin", "answered"),
    [
        ("localhost:9090", "http://localhost:9090", True),
        ("10.0.0.1:9090", "http://10.0.0.1:9090", True),
        ("kvist.example.com", "https://kvist.example.com", True),
        ("qwen.serving.svc:9090", "https://kvist.example.com", True),
        ("localhost:9090", "http://localhost:3000", False),
        ("localhost:9090", "http://evil.example", False),
        ("localhost:9090", "null", False),
        ("localhost:9090", "http://[", False),
        ("10.0.0.1:9090", "http://10.0.0.2:9090", False),
    ],
)
def test_the_origin_must_be_the_page_itself(host: str, origin: str, answered: bool) -> None:
    """A page of another origin, another port included, is answered 403."""
    refused = ORIGIN.refusal({"Host": host, "Origin": origin}, changes=True)

    assert (refused is None) is answered
    assert answered or (refused is not None and refused[0] == 403)


@pytest.mark.parametrize(
    ("site", "mode", "changes", "answered"),
    [
        ("same-origin", "cors", True, True),
        ("none", "navigate", False, True),
        ("cross-site", "navigate", False, True),
        ("cross-site", "navigate", True, False),
        ("same-site", "cors", False, False),
        ("cross-site", "no-cors", False, False),
    ],
)
def test_foreign_sites_may_link_here_and_nothing_else(
    site: str, mode: str, changes: bool, answered: bool
) -> None:
    """Browsers say which site made a request; one of another site may only be a link that was followed."""
    headers = {"Host": "localhost", "Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}

    assert (ORIGIN.refusal(headers, changes=changes) is None) is answered


def test_a_refusal_repeats_nothing_that_a_terminal_would_obey() -> None:
    """Header values in the text are printable and short."""
    refused = ORIGIN.refusal({"Host": "evil\x1b[31m" + "x" * 500})

    assert refused is not None
    assert refused[1].isprintable()
    assert len(refused[1]) < 300
