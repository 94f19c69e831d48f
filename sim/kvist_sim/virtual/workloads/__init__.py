"""Kinds of traffic and fleets, by name: ``cases.CASES``."""
