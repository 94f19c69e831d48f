"""The operator as a process: settings, start, logs, metrics, pages, signals."""
