"""``kvist demo``: the same traffic through the same Envoy twice, kvist picking and round robin.

- ``command``: reads the options, runs the demo, returns the exit code.
- ``plan``: sizes and durations of a run.
- ``run``: for each policy engines, picker and Envoy as real processes, warm-up and load.
- ``live_page``: the picker's live page while the runs go on.
- ``series``: figures of a run over time.
- ``picture``: one picture of both runs.
- ``report``: live progress, and the results as a table and as JSON.
"""
