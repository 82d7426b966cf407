"""The watch over Ray's processes, with a server that answers, falls silent or ends."""

import socket
import subprocess
import sys
import threading
import time

import pytest

from atomrl.cluster import watch as module
from atomrl.cluster.watch import Watch

ANSWER = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


class Server:
    """Greets as HTTP/2 does, until it is told to be silent."""

    def __init__(self):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self.speaks, self.kept = True, []
        threading.Thread(target=self.work, daemon=True).start()

    def work(self):
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            self.kept.append(connection)
            if self.speaks:
                connection.sendall(ANSWER)


@pytest.fixture
def server():
    found = Server()
    yield found
    found.socket.close()


@pytest.fixture
def watched(monkeypatch, server):
    monkeypatch.setattr(module, "_EVERY_S", 0.05)
    monkeypatch.setattr(module, "_GRACE_S", 1e6)
    watch = Watch({"the server": server.address}, 0.3, lambda: None)
    yield watch
    watch.close()


def test_who_falls_silent_is_named_and_may_come_back(watched, server):
    time.sleep(0.5)
    watched.check(0.0)
    server.speaks = False
    with pytest.raises(TimeoutError, match=rf"^the server \({server.address}\) has not answered for 0 s \(cluster.tim"):
        for _ in range(200):
            time.sleep(0.05)
            watched.check(0.15)
    server.speaks = True


def test_a_process_that_has_ended_is_left_to_ray(watched, server):
    server.socket.shutdown(socket.SHUT_RDWR)
    server.socket.close()
    time.sleep(0.6)
    watched.check(0.0)


def test_a_process_that_waits_for_ever_is_ended():
    program = """
import time
from atomrl.cluster import watch
from tests.cluster.test_watch import Server
watch._EVERY_S = watch._GRACE_S = 0.05
server = Server()
server.speaks = False
watch.Watch({"gcs_server": server.address}, 0.2, lambda: print("gives up", flush=True))
time.sleep(60)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert found.returncode == 1 and found.stdout == "gives up\n"
    assert found.stderr.startswith("error: gcs_server (127.0.0.1:") and "has not answered" in found.stderr
