"""A service on this machine that misbehaves as it is told."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Deed = Callable[[BaseHTTPRequestHandler, Any], None]


def send(content: bytes, status: int = 200, **headers: str) -> Deed:
    def deed(handler: BaseHTTPRequestHandler, body: Any) -> None:
        handler.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.end_headers()
        handler.wfile.write(content)

    return deed


def answer(value: Any, **headers: str) -> Deed:
    return send(json.dumps(value).encode(), **headers)


def lengths(handler: BaseHTTPRequestHandler, body: Any) -> None:
    """The number of characters of each completion."""
    answer({"scores": [len(text) for text in body["completions"]]})(handler, body)


def judgement(text: str, used: tuple[int, int] | None = (100, 10), finish_reason: str = "stop") -> Deed:
    """As an OpenAI-compatible endpoint answers."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    usage = {"usage": {"prompt_tokens": used[0], "completion_tokens": used[1]}} if used else {}
    return answer({"object": "chat.completion", "choices": [choice], **usage})


def slow(seconds: float, then: Deed) -> Deed:
    def deed(handler: BaseHTTPRequestHandler, body: Any) -> None:
        time.sleep(seconds)
        then(handler, body)

    return deed


def drop(handler: BaseHTTPRequestHandler, body: Any) -> None:
    """End the connection without an answer."""
    handler.connection.shutdown(socket.SHUT_RDWR)
    handler.close_connection = True


def half(handler: BaseHTTPRequestHandler, body: Any) -> None:
    """End it in the middle of one."""
    send(b'{"sco', Content_Length="1000")(handler, body)
    handler.close_connection = True


def drip(handler: BaseHTTPRequestHandler, body: Any) -> None:
    """A byte now and then, for ever."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b" ")
        handler.wfile.flush()
        time.sleep(0.05)


class Service:
    """Does the deeds in their order, then `usual` for each further request."""

    def __init__(self, usual: Deed = lengths, port: int = 0) -> None:
        self.usual, self.deeds, self.busy, self.most_busy = usual, list[Deed](), 0, 0
        self.requests: list[tuple[dict[str, str], Any, float]] = []
        """Headers, body and time of each."""
        self.lock = threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with service.lock:
                    service.requests.append((dict(self.headers), body, time.monotonic()))
                    deed = service.deeds.pop(0) if service.deeds else service.usual
                    service.busy += 1
                    service.most_busy = max(service.most_busy, service.busy)
                try:
                    deed(self, body)
                except OSError:
                    self.close_connection = True
                finally:
                    with service.lock:
                        service.busy -= 1

            def do_GET(self) -> None:
                deed = service.deeds.pop(0) if service.deeds else service.usual
                deed(self, None)

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *args: Any) -> None:
                pass

        self.server = Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
