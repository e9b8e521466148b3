"""An object server: answers each request for a file of a folder after a delay.

    python -m stalls.objects FOLDER DELAY_S

Its port is in FOLDER/port once it listens; on loopback. A request may name another delay: /FILE?S.
"""

from __future__ import annotations

import http.server
import sys
import time
from pathlib import Path


def main() -> None:
    """Serves until it is killed."""
    folder, delay_s = Path(sys.argv[1]), float(sys.argv[2])

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            name, _, own_s = self.path.partition("?")
            time.sleep(float(own_s or delay_s))
            data = (folder / Path(name).name).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        (folder / "new").write_text(str(server.server_port), encoding="ascii")
        (folder / "new").rename(folder / "port")
        server.serve_forever()


if __name__ == "__main__":
    main()
