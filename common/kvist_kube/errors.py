"""Exceptions of the Kubernetes layer; each message names the cause and, where there is one, the remedy."""


class KubeError(Exception):
    """Base class of the exceptions in this module."""


class ClusterNotFound(KubeError):
    """Raised when neither the environment nor a kubeconfig file says which cluster to use."""


class ApiError(KubeError):
    """A request to the API server that failed; ``status`` is its HTTP status, 0 when there was no answer."""

    def __init__(self, message: str, status: int = 0, *, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        """Seconds that the server asked to wait; 0 when it did not ask."""
