"""One request from its ext_proc message to its answer and its completion, and the registry of endpoints."""
