"""The routing policy: the cost of each endpoint, and the choice. Pure."""
