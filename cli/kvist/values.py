"""Parsers of option values, for argparse. Standard library only."""

import argparse


def positive(text: str) -> float:
    """Parse a number above zero. Raises ArgumentTypeError or ValueError, like the other parsers."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def sizes(text: str) -> tuple[int, ...]:
    """Parse comma-separated whole numbers of at least 1."""
    return tuple(count(part) for part in text.split(","))


def delay(text: str) -> float:
    """Parse a number of at least zero."""
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is below zero")
    return value


def loads(text: str) -> tuple[float, ...]:
    """Parse comma-separated numbers above zero."""
    return tuple(positive(part) for part in text.split(","))


def words(text: str) -> tuple[str, ...]:
    """Parse comma-separated words; empty ones are dropped."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
