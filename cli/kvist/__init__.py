"""The ``kvist`` command: plans, pools of a cluster, the demo, the simulator, the benchmarks.

- ``commands``: the record of every subcommand, with its help, options and function.
- ``options``: options of the subcommands, and parsers of their values.
- ``bench_options``: the same of ``kvist bench``.
- ``pool_commands``: plans, comparisons and objects of a pool.
- ``plan_text``: a plan as text for a terminal.
- ``status_commands``: the pools of a cluster, and why they run as they do.
- ``pool_list``: the table of pools.
- ``pool_why``: what a pool's status says, with its remedies.
- ``cluster_access``: connects to the user's cluster and reads its pools.
- ``kubectl_plugin``: the same commands as a plugin of kubectl, and their completion.
- ``top_command``: ``kvist top``, a live table of a pool.
- ``explain_command``: where a request would go, or why it went there.
- ``picker_client``: reads the pages of a running picker.
- ``cluster_files``: reads files with nodes and prices.
- ``pool_file``: reads a pool's file.
- ``input_files``: reads a file that an option names, or stdin.
- ``errors``: exceptions of commands.

``__main__`` finds the subcommand and runs it. Parsers need the standard library only, so ``--help`` works
without extras.
"""
