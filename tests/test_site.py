"""The navigation and the links of the site, before it is built (tests/website: the built site)."""

import pytest

from tests.website.pages import (
    DOCS,
    StrayLinkError,
    completed,
    decisions,
    linked,
    named,
    navigation,
    outside,
    source,
    unnamed,
    with_links,
)


def test_every_page_is_in_the_navigation() -> None:
    """mkdocs.yml names each document of docs/ (decision records are in a list of their own), and no other.

    The site is built all the same: what it does not name is in a group "More".
    """
    assert unnamed(navigation()) == []
    others = {*outside(), "decisions/index.md"}
    assert [uri for uri in named(navigation()) if uri not in others and not (DOCS / uri).exists()] == []


def test_a_page_without_a_place_is_under_more() -> None:
    """A page that the navigation lacks is added at its end; the examples are filled in."""
    shorter = [entry for entry in navigation() if "Tutorials" not in entry]
    whole = completed(shorter)
    assert whole[-1] == {"More": ["tutorials/cluster.md", "tutorials/laptop.md"]}
    assert "examples/03-plain-envoy.md" in set(named(whole))
    assert not any("More" in entry for entry in completed(navigation()))


@pytest.mark.parametrize(
    ("uri", "link", "expected"),
    [
        ("guides/tls.md", "pools.md#presets", "pools.md#presets"),
        ("guides/tls.md", "../../examples/01-minimal/README.md", "../examples/01-minimal.md"),
        ("guides/several-pools.md", "../../charts/kvist/README.md#values", "../reference/chart.md#values"),
        ("examples/index.md", "../charts/kvist/README.md", "../reference/chart.md"),
        ("examples/01-minimal.md", "../../docs/guides/pools.md", "../guides/pools.md"),
        ("architecture.md", "decisions/", "decisions/index.md"),
        ("benchmarks.md", "../Makefile", "source/Makefile.md"),
        ("index.md", "https://example.com/x", "https://example.com/x"),
        ("index.md", "#here", "#here"),
    ],
)
def test_links_between_files_lead_to_pages(uri: str, link: str, expected: str) -> None:
    """A link between files of the repository leads to the page that the file became."""
    assert with_links(f"[a]({link})", uri) == f"[a]({expected})"


def test_a_link_to_nothing_is_refused() -> None:
    """A link to a file that does not exist ends the build."""
    with pytest.raises(StrayLinkError, match="no file that the site can show"):
        with_links("[a](../nothing.md)", "index.md")


def test_a_file_that_is_linked_becomes_a_page() -> None:
    """The page of a file has its text in a fence, and the search leaves it out."""
    assert linked([("benchmarks.md", "[a](../Makefile) [b](policy.md)")]) == {"source/Makefile.md"}
    text = source("source/tests/test_site.py.md")
    assert text.startswith("---\nsearch:\n  exclude: true\n---\n# test_site.py\n")
    assert "````python\n" in text


def test_the_list_of_decisions_has_every_record() -> None:
    """Each record is listed by its title."""
    assert decisions().count("\n- [") == len(list((DOCS / "decisions").glob("0*.md")))
    assert "(0027-requests-of-one-turn-are-decided-together.md)" in decisions()
