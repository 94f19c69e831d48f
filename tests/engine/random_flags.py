"""Random command lines of users, good and bad, for the comparison with vLLM's own parser."""

import random
from collections.abc import Iterator
from typing import Final

from kvist_operator.engine_flags import OWNED, SECRETS
from kvist_operator.extra_args import PLUGINS
from kvist_operator.flag_table import Flag, Version, options

VALUES: Final = {
    "text": ("x", "a b", "-1", "/a/b", "None", "auto", "a=b", "1.5"),
    "int": ("1", "-1", "+2", "0", "x", "1.5", "8k", "None", " 3"),
    "float": ("1", "0.5", ".5", "1e-3", "x", "4Gi", "-0.5", "None"),
    "size": ("1", "8k", "8K", "1.5k", "1.5K", "8kb", "-1", "x", "None", "auto"),
    "json": ("{}", '{"a": 1}', "[1]", "{a: 1}", "x", "1", "None", '"x"'),
    "object": ("{}", '{"no such key": 1}', "[1]", "{a: 1}", "x", "1", "None", '"x"', '{"k": 8k}'),
    "json-or-text": ("{}", "x", '{"a": {"b": [1]}}', "{a"),
}
"""Values by kind, some of them wrong."""


def lines(version: Version, count: int, seed: int = 7) -> Iterator[list[str]]:
    """Yield lines of one or two flags, the same for the same seed; none is of the plan or a secret."""
    chance = random.Random(seed)
    texts = sorted(options(version))
    free = [text for text in texts if options(version)[text].name not in (*OWNED, *SECRETS, *PLUGINS)]
    for _ in range(count):
        chosen = chance.sample(free, chance.choice((1, 1, 2)))
        if len({options(version)[text].name for text in chosen}) == len(chosen):
            yield [word for text in chosen for word in _flag(options(version)[text], text, chance)]


def _flag(flag: Flag, text: str, chance: random.Random) -> list[str]:
    """Return a flag in one of its spellings, with values."""
    if text.startswith("--") and chance.random() < 0.15:
        text = "--" + text[2:].replace("-", "_")
    elif text.startswith("--") and chance.random() < 0.08:
        text += chance.choice("sxz")
    if flag.kind in ("json-or-text", "object") and chance.random() < 0.3:
        return [f"{text}.{chance.choice(('a', 'a.b', 'a_b', 'a+'))}", chance.choice(("1", "x", "a,b"))]
    if flag.kind == "switch":
        return [text, *chance.choices(([], ["x"]), (8, 1))[0]] if chance.random() < 0.9 else [f"{text}=x"]
    known = [*flag.choices] if chance.random() < 0.6 else []
    values = known or [*VALUES[flag.kind]]
    given = chance.sample(values, min(len(values), chance.choices((0, 1, 2), (1, 12, 2))[0]))
    return [f"{text}={given[0]}", *given[1:]] if given and chance.random() < 0.4 else [text, *given]
