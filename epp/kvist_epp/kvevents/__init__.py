"""KV cache events: subscription, sequencing, replay, ingestion and the check of decoded blocks."""
