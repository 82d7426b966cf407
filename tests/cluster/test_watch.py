"""The watch over Ray's processes, with a server that answers, falls silent or ends."""

import socket
import subprocess
import sys
import threading
import time

import pytest

from atomrl.cluster import watch as module
from atomrl.cluster.watch import RayHangs, Watch

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
    server = Server()
    yield server
    server.socket.close()


@pytest.fixture
def watched(monkeypatch, server):
    monkeypatch.setattr(module, "CHECK_EVERY_S", 0.05)
    monkeypatch.setattr(module, "CALL_GRACE_S", 0.1)
    watch = Watch({"the server": server.address}, 0.3, lambda: None)
    yield watch
    watch.close()


def silent(watch):
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.05)
        watch.check()


def until_it_answers(watch):
    """On a busy machine also an answer of a healthy server comes too late at times."""
    end = time.monotonic() + 60
    while True:
        try:
            return watch.check(0.0)
        except RayHangs:
            assert time.monotonic() < end
            time.sleep(0.05)


def test_a_silent_server_is_named_and_may_return(watched, server):
    time.sleep(0.5)
    until_it_answers(watched)
    server.speaks = False
    with pytest.raises(RayHangs, match=f"server.*{server.address}.*not answered"):
        silent(watched)
    time.sleep(0.5)  # nobody waits inside of a call, so this process goes on
    server.speaks = True
    until_it_answers(watched)


def test_calls_that_may_take_as_long_are_waited_for(watched, server):
    server.speaks = False
    with watched.inside(600.0), pytest.raises(RayHangs):
        silent(watched)
    time.sleep(0.5)


def test_answers_that_are_missed_once_or_twice_are_no_silence(monkeypatch):
    answers, said, begun = [True, False, True, False, False, True, False, False, False], [], threading.Event()

    def speaks(address, timeout_s):
        """Answer as it is written, and note what is said of the answers before."""
        begun.wait()
        try:
            watch.check(0.0)
        except RayHangs as error:
            said.append((len(answers), str(error)))
        if answers and not answers.pop(0):
            raise TimeoutError
        return True

    monkeypatch.setattr(module, "CHECK_EVERY_S", 0.01)
    monkeypatch.setattr(module, "speaks_http2", speaks)
    watch, end = Watch({"the server": "127.0.0.1:9"}, 60.0, lambda: None), time.monotonic() + 60
    begun.set()
    while not said and time.monotonic() < end:
        time.sleep(0.01)
    watch.close()
    assert [(left, "the server" in words) for left, words in said] == [(0, True)], "after the third in a row"


def test_a_process_that_has_ended_is_left_to_ray(watched, server):
    server.socket.shutdown(socket.SHUT_RDWR)
    server.socket.close()
    time.sleep(0.6)
    watched.check(0.0)


@pytest.mark.parametrize("reader", [subprocess.PIPE, None])
def test_a_process_that_waits_inside_of_ray_is_ended(reader):
    """Also where nobody reads its last words."""
    program = """
import sys, time
from atomrl.cluster import watch
from tests.cluster.test_watch import Server
watch.CHECK_EVERY_S = watch.CALL_GRACE_S = 0.05
server = Server()
server.speaks = False
if len(sys.argv) > 1:
    sys.stderr.close()
watcher = watch.Watch({"gcs_server": server.address}, 0.2, lambda: print("gives up", flush=True))
with watcher.inside():
    time.sleep(600)
"""
    command = [sys.executable, "-c", program, *([] if reader else ["closed"])]
    completed = subprocess.run(command, stdout=subprocess.PIPE, stderr=reader, text=True, timeout=500)
    assert completed.returncode == 1 and completed.stdout == "gives up\n"
    if reader:
        assert completed.stderr.startswith("error: gcs_server (127.0.0.1:") and "has not answered" in completed.stderr
