"""The cluster as the operator sees it: the seam, the real API server behind it, what is known of it."""
