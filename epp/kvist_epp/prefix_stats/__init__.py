"""Statistics of prefixes: popularity, recent uses, cache value, divergence. Pure."""
