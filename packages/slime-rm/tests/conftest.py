"""A real HTTP server for rewards that ask one."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class Script(ThreadingHTTPServer):
    """Answers each request as `answer(number, path, body) -> (status, text)` says; `stuck` holds it until the end."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests = []
        self.answer = lambda number, path, body: (200, "1.0")
        self.over = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}"

    def stuck(self, number, path, body):
        self.over.wait()
        return 200, "1.0"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, dict(self.headers)))
        status, text = self.server.answer(len(self.server.requests), self.path, body)
        if not self.server.over.is_set():
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

    def log_message(self, *words):
        pass


@pytest.fixture
def server():
    with Script() as script:
        thread = threading.Thread(target=script.serve_forever, args=(0.01,))
        thread.start()
        yield script
        script.over.set()
        script.shutdown()
        thread.join()
