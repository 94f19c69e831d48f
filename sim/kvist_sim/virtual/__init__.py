"""Routing policies in virtual time: engines, traffic and routers in one process, without a socket."""
