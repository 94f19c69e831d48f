"""Measurements: ``epp`` (the picker behind a real Envoy) and ``index`` (the prefix index by itself)."""
