"""Flow control: which requests wait while endpoints are full, and which is sent next.

Sans I/O but for ``driver``.

- ``flow_controller``: queues requests, dispatches or rejects them.
- ``driver``: runs it on an event loop, in slices between picks.
- ``request_queue``: levels of priority, and displacement where the queue is full.
- ``deficit_round_robin``: fair turns of tenants within one priority.
- ``capacity``: which queued requests could be sent now.
- ``queue_deadlines``: how long requests may wait; the dispatch rate.
- ``priorities``: tenant and priority by a request's headers.
"""
