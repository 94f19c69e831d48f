"""A small web server that pods of the tests run: it reports its surroundings and does what requests ask.

``/`` the pod's name · ``/whoami`` identity as JSON · ``/env/NAME`` · ``/file/PATH`` · ``/health`` ·
``/exit/CODE`` ends it, after writing a last word to the file in ``LAST_WORDS``.
"""

import http.server
import json
import os
import signal
import threading
from pathlib import Path
from typing import Final

PORT: Final = 8000


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers one request."""

    def do_GET(self) -> None:
        """See the top of this file."""
        name, _, rest = self.path[1:].partition("/")
        body = getattr(self, f"_{name or 'name'}", self._missing)(rest)
        self.send_response(404 if body is None else 200)
        data = (body or "").encode()
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Probes are not worth a line."""

    def _missing(self, _: str) -> str | None:
        return None

    def _name(self, _: str) -> str:
        return os.environ["POD_NAME"]

    def _health(self, _: str) -> str:
        return "ok"

    def _env(self, name: str) -> str | None:
        return os.environ.get(name)

    def _file(self, path: str) -> str | None:
        try:
            return Path(f"/{path}").read_text()
        except OSError:
            return None

    def _whoami(self, _: str) -> str:
        status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return json.dumps(
            {
                "user": os.getuid(),
                "group": os.getgid(),
                "groups": os.getgroups(),
                "pid": os.getpid(),
                "host": os.uname().nodename,
                "capabilities": status["CapEff"],
                "privileges": status["NoNewPrivs"],
                "writes": [path for path in ("/", "/tmp", "/data") if os.access(path, os.W_OK)],
                "processes": sorted(int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()),
            }
        )

    def _exit(self, code: str) -> None:
        Path(os.environ["LAST_WORDS"]).write_text("asked to exit")
        os._exit(int(code))


def main() -> None:
    """Serves until SIGTERM, then ends with 0 once the requests are done."""
    server = http.server.ThreadingHTTPServer(("", PORT), Handler)
    server.daemon_threads = False
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    print("serving", flush=True)  # noqa: T201
    server.serve_forever()
    server.server_close()
    print("bye", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
