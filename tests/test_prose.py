"""The lint of prose finds what house style forbids, and leaves public names alone."""

from tests.prose import document, module


def test_words_of_the_list_are_found_in_documents() -> None:
    """Lines with a word of the list are reported; code spans and fenced blocks are exempt."""
    text = "A request that nobody wants.\n`nobody` is a user.\n```text\nnobody\n```\nFine.\n"
    assert [line for line, _ in document(text)] == [1]


def test_docstrings_need_a_subject_and_three_words() -> None:
    """A docstring is reported for its first word, its length, or a word of the list."""
    source = (
        "def a():\n    '''What comes next is returned.'''\n"
        "def b():\n    '''Too short.'''\n"
        "def c():\n    '''Return what the endpoint owes.'''\n"
        "def d():\n    '''Return the endpoint's backlog in tokens.'''\n"
    )
    assert [line for line, _ in module(source)] == [2, 4, 6]


def test_strings_that_users_read_are_checked() -> None:
    """Literals with spaces are held to the word list; names without spaces are not."""
    assert [line for line, _ in module("log('nobody answers')\nNAME = 'nobody'\n")] == [1]
