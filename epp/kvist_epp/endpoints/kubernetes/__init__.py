"""The fleet from Kubernetes: pods, pools and objectives, listed and watched.

Law: ``objects``, ``pods``, ``pools``, ``store`` and ``recovery`` are pure; only ``api`` knows the client
library and the network; an error never makes the fleet smaller, only what the API says does."""
