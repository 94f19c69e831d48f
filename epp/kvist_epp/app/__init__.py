"""The picker as a process: startup, ports, readiness, shutdown. The only package that connects the parts.

``app.main`` makes every part from the settings, opens the ports, reports readiness and drains at the end.

- ``app``: makes the picker's parts, connects them, and runs them until the shutdown.
- ``decision_batch``: has the requests of one turn of the event loop decided together.
- ``readiness``: decides when the picker becomes ready, and says why it is not.
- ``process``: a process of either role: opens its gRPC ports, runs until a signal or a failure, drains.
- ``model_loader``: loads the tokenizer, retries in the background, and activates the loaded model.
"""
