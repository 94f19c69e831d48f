"""What options may be: numbers and lists, checked as they are read. Standard library only."""

import argparse


def positive(text: str) -> float:
    """A number above zero. Raises ArgumentTypeError or ValueError, as all here."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def count(text: str) -> int:
    """A whole number from 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas."""
    return tuple(count(part) for part in text.split(","))


def delay(text: str) -> float:
    """A number from zero on."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is below zero")
    return value


def loads(text: str) -> tuple[float, ...]:
    """Numbers above zero, separated by commas."""
    return tuple(positive(part) for part in text.split(","))


def words(text: str) -> tuple[str, ...]:
    """Words, separated by commas; none of them is empty."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
