"""The picker, which computes every prompt elsewhere that it can: ``python -m kvist_sim.eager_picker FLAGS``.

The engines of tests and benchmarks are idle, so that nothing would be gained by it; rules without a
margin and without a least length decide for it nevertheless. Everything else is the product's."""

import functools
import os
import sys
from typing import Final

from kvist_epp.app.app import open_app
from kvist_epp.app.process import run_process
from kvist_epp.scheduling.leg_costs import DisaggregationPolicy
from kvist_epp.settings.settings import Settings

EAGER: Final = DisaggregationPolicy(least_tokens=1.0, margin_seconds=-1e9)

if __name__ == "__main__":
    settings = Settings.from_args(sys.argv[1:], os.environ).check()
    run_process(settings, functools.partial(open_app, rules=EAGER))
