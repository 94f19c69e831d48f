"""The operator's table of defaults against the classes that vLLM reads config.json with."""

from tests.engine.class_defaults import FILE, read, spelled


def test_the_table_is_what_the_classes_of_the_installed_transformers_say() -> None:
    """Each default in the operator's table is that of the class in the transformers of the tested vLLM."""
    assert FILE.read_text() == spelled(read())
