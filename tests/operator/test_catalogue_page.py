"""Promises of the page that lists the catalogue."""

from tests.operator.catalogue_page import MISSING, PAGE, page

from kvist_operator.models.catalogue import catalogue


def test_the_page_lists_every_model_with_its_source() -> None:
    """docs/catalogue.md is what ``make golden`` writes: one row for each model of the catalogue."""
    text = page()

    assert PAGE.read_text() == text
    assert all(f"\n| {name} | " in text for name in catalogue())


def test_models_that_are_listed_as_missing_are_not_in_the_catalogue() -> None:
    """A single name in the list of missing models is in no entry."""
    names = [name.strip().lower() for names, _ in MISSING for name in names.split(",") if "-" in name]

    assert [n for n in names if any(each.lower().endswith(f"/{n}") for each in catalogue())] == []
