"""``kvist demo``: the same traffic through the same Envoy twice, kvist picking and round robin.

plan (sizes, from the command line) → pool (engines, picker, Envoy as real processes) → run (warm-up,
load, both policies) → report (a table or JSON). display shows what is going on meanwhile.
"""
