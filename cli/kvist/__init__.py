"""The ``kvist`` command: plans, the demo, the simulator, the benchmarks.

- ``commands``: the record of every subcommand, with its help, options and function.
- ``options``: options of the subcommands, and parsers of their values.
- ``bench_options``: the same of ``kvist bench``.
- ``pool_commands``: plans, comparisons and objects of a pool.
- ``top_command``: ``kvist top``, a live table of a pool.
- ``explain_command``: where a request would go, or why it went there.
- ``picker_client``: reads the pages of a running picker.
- ``cluster_files``: reads files with nodes and prices.
- ``pool_file``: reads a pool's file.
- ``errors``: exceptions of commands.

``__main__`` finds the subcommand and runs it. Parsers need the standard library only, so ``--help`` works
without extras.
"""
