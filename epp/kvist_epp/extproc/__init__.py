"""Envoy's ext_proc protocol and access log: sessions, bodies, replies, and the gRPC methods."""
