"""Model files of the simulator: a vocabulary trained on ``corpus.txt``, a template, a config.

Package data, so that the demo needs no download. ``python -m kvist_sim.model.train`` writes them again,
byte for byte; a test holds them to that. Nothing else lives here.
"""

from importlib.resources import files
from pathlib import Path
from typing import Final

NAME: Final = "kvist-sim"
"""Served model name when the command line gives none."""


def folder() -> Path:
    """Return the folder with ``tokenizer.json``, ``tokenizer_config.json``, ``config.json`` and
    ``corpus.txt``."""
    return Path(str(files(__name__)))
