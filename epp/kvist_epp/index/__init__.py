"""The byte index, look-up, routing history, accuracy and snapshots. Pure."""
