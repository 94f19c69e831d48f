"""The picker as a process: startup, ports, readiness, shutdown. The only package that connects the parts.

``app.main`` makes every part from the settings, opens the ports, reports readiness and drains at the end.

- ``app``: makes the picker's parts, connects them, and runs them until the shutdown.
- ``listeners``: opens a gRPC port on the configured transport, with TLS if configured.
- ``readiness``: decides when the picker becomes ready, and says why it is not.
- ``shutdown``: runs a process of either role until a signal or a failure, then drains it.
- ``model_loader``: loads the tokenizer, retries in the background, and activates the loaded model.
"""
