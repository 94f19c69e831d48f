"""Admission, queueing, deficit round robin, deadlines and capacity. Pure but for its timers."""
