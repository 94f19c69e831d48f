"""The part of ``docs/policy.md`` about prefill at another endpoint, from the product's own terms and
constants."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Final

from kvist_epp.scheduling.leg_costs import RULES, SPLIT_TERMS, WHOLE_TERMS


def disaggregation_section(documented: Mapping[str, str]) -> str:
    """Return the section; ``documented``: docstrings of the constants by name."""
    rules = [(one.name, getattr(RULES, one.name)) for one in fields(RULES)]
    return TEMPLATE.format(
        whole=" + ".join(WHOLE_TERMS),
        split=" + ".join(SPLIT_TERMS),
        terms="\n".join(f"| `{name}` | {about} |" for name, about in SPLIT_TERMS.items()),
        rules="\n".join(f"| `{name}` | {value:,.10g} | {documented[name]} |" for name, value in rules),
    )


TEMPLATE: Final = """
## Prefill at another endpoint

With `--disaggregation=on` (decision [53](decisions/0053-disaggregation-is-decided-by-cost.md)) each request
has two kinds of alternatives, in seconds. The cheaper one counts, by a margin; `/debug/pick` has the terms
of both and the decision in words.

```
at one endpoint  = {whole}
at two endpoints = {split}
```

| term | seconds |
|---|---|
{terms}

- The two endpoints differ, have equal labels `kvist.dev/kv-compatibility` (or none), and roles
  (`kvist.dev/role`, `llm-d.ai/role`) that allow their legs. An endpoint without a role may serve either leg.
  One with the role `prefill` takes ordinary requests only while no other endpoint is ready.
- The price of prefill is that of the sequences on the endpoint, not the pool's mean. Without a TPOT target, a
  second in which a sequence waits for a prompt costs `price_running`. With one, an answer that is fast enough
  loses nothing: the picker knows the share of an endpoint's time that prompts may take and the share that
  they took in the last seconds, and estimates from both which part of the answers is too slow.
- `opening` packs sequences on few endpoints as prompts press, so that the others compute prompts without
  disturbing a sequence. Nothing fixes the ratio. Requests for one endpoint avoid the others for the same
  reason, unless the endpoints that are left are full or defer them.
- Under a TPOT target an endpoint that defers prompts costs the time until it will take this one up: its
  allowance has to grow by what it lacks and by all that waits there. So prompts go where they are taken up:
  also to endpoints with sequences, as far as the target leaves time for prompts there.
- The time for prompts follows the sequences that came since the endpoint was measured: what each adds to a
  token's time is learned over all endpoints (`load.token_time`).
- Where the decode endpoint holds a prefix, only the rest is transferred; what the prefill endpoint holds is
  not computed. Fewer than `least_tokens` uncached tokens are never computed elsewhere.

| constant | value | origin |
|---|---|---|
{rules}
"""
