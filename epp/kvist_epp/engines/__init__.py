"""Inference engines that the picker understands, one package each."""
