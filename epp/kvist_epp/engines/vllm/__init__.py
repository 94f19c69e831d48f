"""Everything that is true of vLLM only: the event codec and its metrics pages."""
