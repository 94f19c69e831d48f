"""kvist-epp, the endpoint picker: Envoy asks where a request should go, and it answers.

The read path, one request::

    wire.server → wire.http2 → wire.exchange → picker.decide
        → prompt.request → prompt.model (template, vocab) → cache.index.match → schedule.cost → schedule.pick
        → wire.reply

The learn path, all the time::

    cache.subscriber → cache.fence → cache.events → cache.learner (vocab) → cache.index

They meet in one object, the ``Index``; the fleet is an immutable snapshot that both read.

The law of the package: what can be pure is pure (a transition returns the I/O to do), sockets live in
``wire.server``, ``wire.grpc_server``, ``cache.subscriber``, ``fleet`` and ``admin``, only ``picker`` knows
every part, and prompt text never leaves the process. Import-linter holds the modules to it.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvist")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"
