"""An HTTP/2 and gRPC server with TLS. Knows nothing of ext_proc."""
