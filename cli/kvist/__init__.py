"""The ``kvist`` command: thin parsers that call the simulator, the demo and the benchmarks."""
