"""Engines behind HTTP servers: servers that hang, die, restart or have other weights; and weights written as files."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from atomrl.common import outages
from atomrl.engines.generation import generate, requests_of
from atomrl.engines.requests import EngineOptions
from atomrl.engines.server_process import ServerProcess
from atomrl.engines.server_weights import write_weights
from atomrl.engines.sglang import SGLangEngine
from atomrl.engines.sglang_checksums import DIFFERS, digest_of, held_hashes
from atomrl.engines.vllm_server import VLLMServerEngine
from atomrl.engines.vllm_worker import WORKER_EXTENSION
from atomrl.models.loading import read_weights
from atomrl.protocols import WeightUpdate
from atomrl.types import SamplingParams
from atomrl.weight_sync import tensor_hash
from tests.engines.fake_sglang import FakeSGLang
from tests.prompts import prompts_of, response
from tests.tiny import make_tiny_model

LONG = SamplingParams(completions_per_prompt=4, max_completion_tokens=30, ignore_eos=True)
SHORT = SamplingParams(completions_per_prompt=3, max_completion_tokens=8)
PROMPTS = prompts_of((5, 6, 7), (20, 21), (40,))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"), "llama", seed=3, scale=0.2)


@pytest.fixture
def fakes(folder):
    made: list[FakeSGLang] = []

    def make(**options) -> FakeSGLang:
        made.append(FakeSGLang(str(folder), **options))
        return made[-1]

    yield make
    for fake in made:
        if fake.alive:
            fake.close()


@pytest.fixture
def connect(folder):
    made: list[SGLangEngine] = []

    def make(*fakes: FakeSGLang, timeout_s: float = 200.0, **options) -> SGLangEngine:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        urls = tuple(fake.url for fake in fakes)
        options = EngineOptions(torch.float32, "cpu", 64, server=urls, server_timeout_s=timeout_s, **options)
        made.append(SGLangEngine.from_pretrained(str(folder), tokenizer, options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def drawn(engine, sampling=SHORT):
    return [response(trajectory) for trajectory in generate(engine, PROMPTS, sampling)]


@contextmanager
def under_way(engine, fake, prompts=PROMPTS[:1], **sampling):
    """Requests of a server which have five tokens each, and get no more until the block ends."""
    requests = [one for prompt in prompts for one in requests_of(prompt, SamplingParams(ignore_eos=True, **sampling))]
    with fake.at_most(5):
        engine.submit(requests)
        fake.wait_for_tokens(len(requests))
        yield requests


TWO_LONG = {"completions_per_prompt": 2, "max_completion_tokens": 150}


def scaled(folder, factor):
    return [(name, tensor * factor) for name, tensor in read_weights(folder)]


def test_a_server_that_is_there_gets_the_weights_before_it_draws(fakes, connect, folder):
    fake = fakes()
    with torch.no_grad():
        for parameter in fake.model.parameters():
            parameter.mul_(0.5)  # it was started with another checkpoint
    connect(fake)
    ours = dict(read_weights(folder))
    assert all(torch.equal(tensor, ours[name]) for name, tensor in fake.model.named_parameters())
    assert fake.label.startswith("0@")


def test_two_servers_share_the_groups_and_draw_what_one_draws(fakes, connect):
    one, two = fakes(), fakes()
    alone, both = connect(fakes()), connect(one, two)
    assert drawn(both) == drawn(alone)
    assert {one.calls.count("/generate"), two.calls.count("/generate")} == {3, 6}  # whole groups


def test_seeds_are_said_to_be_ignored_where_one_server_ignores_them(fakes, connect):
    assert connect(fakes(), fakes()).seeded
    assert not connect(fakes(), fakes(deterministic=False)).seeded
    assert not connect(fakes(deterministic=False), fakes()).seeded


def test_a_server_that_hangs_is_named_within_its_time(fakes, connect):
    """And not asked to give up what it holds, which would take a second timeout."""
    fake = fakes()
    engine = connect(fake)
    for pool in engine.client.pools:
        pool.timeout = 1.0  # from here on: a busy machine takes its time for the first answers
    fake.hangs = True
    with pytest.raises(TimeoutError, match=f"{fake.url}.*/generate"):
        generate(engine, PROMPTS, SHORT)
    assert "/generate" in fake.calls and "/abort_request" not in fake.calls


@pytest.mark.parametrize("said", [[], None, [{"start": 0, "end": 7}]])
def test_tokens_that_no_version_is_told_of_are_refused(fakes, connect, monkeypatch, said):
    fake = fakes()
    engine, answer = connect(fake), fake.answer
    said = said and [span | {"version": engine.label} for span in said]

    def other(request, logprobs):
        reply = answer(request, logprobs)
        reply["meta_info"]["weight_versions"] = said
        return reply

    monkeypatch.setattr(fake, "answer", other)
    long = SamplingParams(max_completion_tokens=8, ignore_eos=True)
    with pytest.raises(RuntimeError, match=r"which weights.*8 tokens"):
        generate(engine, PROMPTS, long)


def test_a_server_that_another_run_gives_weights_is_refused(fakes, connect, folder):
    """Its version 0 is not ours, whatever the number."""
    fake = fakes()
    engine = connect(fake)
    with under_way(engine, fake, **TWO_LONG):
        connect(fake)
    message = (
        rf"SGLangEngine at {fake.url} sampled with weights that another run sent to it .*each run needs its own servers"
    )
    with pytest.raises(RuntimeError, match=message):
        while True:
            assert len(engine.poll()) < 3
    engine.abort()
    engine.update_weights(WeightUpdate(version=1, tensors=scaled(folder, 0.8)))
    assert fake.label == engine.label and len(drawn(engine)) == 9


def test_a_completion_that_ended_otherwise_is_refused(fakes, connect, monkeypatch):
    fake = fakes()
    engine, finish = connect(fake), fake.finish
    monkeypatch.setattr(fake, "finish", lambda request, reason: finish(request, {"type": "error"}))
    with pytest.raises(RuntimeError, match="'error'"):
        generate(engine, PROMPTS, SHORT)


def test_completions_aborted_by_a_server_are_retried_a_few_times(fakes, connect, monkeypatch):
    fake = fakes()
    engine = connect(fake)
    expected = drawn(engine)
    answer, given_up = fake.answer, []

    def abort(request, logprobs):
        if len(given_up) < limit:
            given_up.append(request.rid)
            request.reason = {"type": "abort", "message": "no room"}
        return answer(request, logprobs)

    monkeypatch.setattr(fake, "answer", abort)
    limit = 2
    assert drawn(engine) == expected and len(given_up) == 2
    limit = 10_000
    with pytest.raises(RuntimeError, match=r"4 times.*on its own"):
        drawn(engine)


def test_a_server_that_is_not_there_is_named(connect):
    class Nowhere:
        url = "http://127.0.0.1:9"

    with pytest.raises(TimeoutError, match=r"127\.0\.0\.1:9.*not ready"):
        connect(Nowhere(), timeout_s=0.5)


def test_requests_of_a_server_that_returns_are_done_again_with_the_current_weights(fakes, connect, folder):
    fake = fakes()
    engine = connect(fake)
    engine.update_weights(WeightUpdate(version=4, tensors=scaled(folder, 0.9)))
    expected = drawn(engine, LONG)
    with under_way(engine, fake, PROMPTS, completions_per_prompt=4, max_completion_tokens=30) as requests:
        fake.close()
    again = fakes(port=fake.server.server_port)  # with the weights of the folder
    outputs = {}
    while len(outputs) < 12:
        outputs |= {output.request_id: output for output in engine.poll()}
    again_drawn = [outputs[request.request_id].segments for request in requests]
    assert [segments[0].token_ids for segments in again_drawn] == expected
    assert {segment.policy_version for segments in again_drawn for segment in segments} == {4}
    assert again.label.startswith("4@")


class Proxy(httpx.AsyncBaseTransport):
    """In front of a server; it answers by itself as often as it is told to."""

    def __init__(self, inner, status, body, times):
        self.inner, self.status, self.body, self.times = inner, status, body, times

    async def handle_async_request(self, request):
        if request.url.path == "/generate" and self.times[0]:
            self.times[0] -= 1
            return httpx.Response(self.status, content=self.body)
        return await self.inner.handle_async_request(request)


PAGES = [(503, b"busy"), (502, b"<html>Bad gateway</html>"), (429, b""), (200, b"<!doctype html><html>Down</html>")]


@pytest.mark.parametrize(("status", "body"), PAGES)
def test_a_server_behind_a_proxy_that_answers_for_it_is_waited_for(fakes, connect, monkeypatch, caplog, status, body):
    monkeypatch.setattr(outages, "FIRST_S", 0.01)
    engine = connect(fakes())
    expected, times = drawn(engine), [6]
    for pool in engine.client.pools:
        pool._transport = Proxy(pool._transport, status, body, times)
    assert drawn(engine) == expected and not times[0]
    assert "is unavailable (/generate: " in caplog.text and "rollout.server_timeout_s=200" in caplog.text


def test_one_that_stays_unavailable_ends_the_run(fakes, connect, monkeypatch):
    monkeypatch.setattr(outages, "FIRST_S", 0.05)
    engine = connect(fakes())
    engine.replicas[0].outage = outages.Outage("the server", 1.0, "rollout.server_timeout_s")
    for pool in engine.client.pools:
        pool._transport = Proxy(pool._transport, 503, b"busy", [10**6])
    with pytest.raises(RuntimeError, match=r"rollout\.server_timeout_s=1.*busy"):
        drawn(engine)


def test_weights_change_between_two_tokens_and_each_token_knows_which_drew_it(fakes, connect, folder):
    fake = fakes()
    engine = connect(fake)
    with under_way(engine, fake, **TWO_LONG):
        engine.update_weights(WeightUpdate(version=1, tensors=scaled(folder, 0.8)))
    outputs = []
    while len(outputs) < 2:
        outputs += engine.poll()
    models = {version: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for version in (0, 1)}
    models[1].load_state_dict({name: t.double() for name, t in scaled(folder, 0.8)}, strict=False)
    models[1].tie_weights()
    for output in outputs:
        assert [segment.policy_version for segment in output.segments] == [0, 1]
        ids, begin = [token for segment in output.segments for token in segment.token_ids], 0
        for segment in output.segments:
            with torch.no_grad():
                logits = models[segment.policy_version](torch.tensor([[5, 6, 7, *ids]])).logits[0, 2:-1].log_softmax(-1)
            expected = logits[torch.arange(150), torch.tensor(ids)][begin : begin + len(segment.token_ids)]
            assert (expected - torch.tensor(segment.logprobs)).abs().max() < 5e-5
            begin += len(segment.token_ids)


def test_weights_are_broadcast_in_pieces_and_a_server_that_returns_gets_them(fakes, connect, folder, monkeypatch):
    monkeypatch.setattr("atomrl.engines.sglang.BROADCAST_BYTES", 10_000)
    one, two = fakes(), fakes()
    engine = connect(one, two, server_weights="collective")
    for version in (1, 2):
        engine.update_weights(WeightUpdate(version, scaled(folder, 1 + version)))
    ours = {name: tensor * 3 for name, tensor in read_weights(folder)}
    for fake in (one, two):
        assert all(torch.equal(tensor, ours[name]) for name, tensor in fake.model.named_parameters())
        assert fake.calls.count("/init_weights_update_group") == 1 and "/update_weights_from_disk" not in fake.calls
        assert fake.calls.count("/update_weights_from_distributed") > 3 * fake.calls.count("/begin_weight_update")
    assert {held.value for held in engine.weight_hashes()} == {tensor_hash(t, t.dtype) for t in ours.values()}
    two.close()
    again = fakes(port=two.server.server_port)
    drawn(engine)  # by both
    assert all(torch.equal(tensor, ours[name]) for name, tensor in again.model.named_parameters())
    assert len(engine.weight_hashes()) == 2 * len(ours)
    assert one.calls.count("/init_weights_update_group") == 1, "its group is its own"


def test_hashes_of_a_servers_weights_are_reported_where_it_gives_them():
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    sent = {name: torch.full((2, 3), float(place)) for place, name in enumerate(names)} | {"norm": torch.ones(3)}
    digest = digest_of("cpu")
    sums = {
        "model.layers.0.self_attn.qkv_proj.weight": digest(torch.cat([sent[name] for name in names[:3]])),
        names[3]: digest(sent[names[3]] + 1),
        "a.buffer": "0",
    }

    def values(digest) -> list[int | None]:
        return [held.value for held in held_hashes(sent, sent, sums, digest)]

    assert values(digest) == [*(tensor_hash(sent[name], torch.float32) for name in names[:3]), DIFFERS, None]
    assert values(None) == [None] * 5


def test_new_adapters_have_what_is_running_begin_again(fakes, connect, folder):
    from atomrl.protocols import Adapter

    fake = fakes()
    engine = connect(fake, lora_rank=2)
    adapter = Adapter(a=torch.full((2, 32), 0.1), b=torch.full((32, 2), 0.1), scale=0.5)
    layer = "model.layers.0.self_attn.q_proj.weight"
    engine.update_weights(WeightUpdate(version=1, adapters={layer: adapter}))
    with under_way(engine, fake, max_completion_tokens=120):
        engine.update_weights(WeightUpdate(version=2, adapters={layer: adapter}))
    (output,) = engine.poll()
    assert [segment.policy_version for segment in output.segments] == [2]
    assert len(output.segments[0].token_ids) == 120 and len(fake.adapters) == 1


def test_a_server_without_adapters_is_refused_for_a_config_with_some(fakes, connect, monkeypatch):
    fake = fakes()
    about = fake.about
    monkeypatch.setattr(fake, "about", lambda path: about(path) | {"enable_lora": False})
    with pytest.raises(RuntimeError, match="--enable-lora"):
        connect(fake, lora_rank=2)


def test_the_fake_refuses_what_sglang_does_not_know(fakes):
    import httpx

    fake = fakes()
    post = httpx.Client(base_url=fake.url).post
    bad = [
        ("/generate", {"input_ids": [5], "sampling_params": {"max_tokens": 3}}),
        ("/generate", {"input_ids": [5], "sampling_params": {}, "seed": 3}),
        ("/generate", {"input_ids": ["a"], "sampling_params": {}}),
        ("/generate", {"input_ids": [5], "sampling_params": {"ignore_eos": 1}}),
        ("/pause_generation", {"mode": "keep"}),
        ("/continue_generation", {}),
        ("/update_weights_from_disk", {"model_path": fake.path, "flush_cache": False}),
        ("/update_weights_from_distributed", {"names": [], "dtypes": [], "shapes": []}),  # in no session
        ("/end_weight_update", {}),
        ("/update_weights_from_disk", {"model_path": fake.path}),  # a tied head has no name of its own there
    ]
    for path, body in bad:
        assert post(path, json=body).status_code == 400, (path, body)


def test_a_tied_head_is_written_under_its_own_name(tmp_path):
    embedding = torch.ones(3, 2, dtype=torch.bfloat16)
    tensors = [("model.embed_tokens.weight", embedding), ("model.norm.weight", torch.zeros(2))]
    saved = load_file(
        write_weights(WeightUpdate(1, tensors), tmp_path / "1", torch.float32, "model.embed_tokens.weight")
        / "model.safetensors"
    )
    assert torch.equal(saved["lm_head.weight"], embedding.float()) and len(saved) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


SLEEPER = """
import sys, time
from atomrl.engines.server_process import ServerProcess
deaf = "import os, signal as s, time; s.signal(15, s.SIG_IGN); print(os.getpid(), flush=True); time.sleep(100)"
process = ServerProcess(lambda port: ([sys.executable, "-c", deaf], {}))
while not process.tail():
    time.sleep(0.05)
print(process.tail(), flush=True)
time.sleep(100)
"""


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_server_that_was_started_here_ends_with_its_driver_also_when_that_is_killed():
    driver = subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True)
    pid = int(driver.stdout.readline())
    assert alive(pid)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    end = time.monotonic() + 120  # it is deaf to SIGTERM, as vLLM is while it starts
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(pid)


LISTENER = """
import socket, sys, time
time.sleep(0.5)
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listens", flush=True)
time.sleep(100)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port cannot be kept")
def test_the_port_of_a_server_is_its_own_before_it_listens():
    process = ServerProcess(lambda port: ([sys.executable, "-c", LISTENER, str(port)], {}))
    place = ("127.0.0.1", int(process.url.rpartition(":")[2]))
    try:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(place)
        end = time.monotonic() + 120
        while not process.tail() and time.monotonic() < end:
            time.sleep(0.05)
        assert process.tail() == "listens"
        socket.create_connection(place).close()
    finally:
        process.end()
    with socket.create_server(place):  # given back
        pass


def test_a_server_that_ends_while_it_starts_is_named_with_its_last_words(folder, monkeypatch):
    words = [sys.executable, "-c", "print('no kernels for this machine'); raise SystemExit(3)"]
    monkeypatch.setattr(SGLangEngine, "server_command", lambda self, port: (words, {}))
    options, before = EngineOptions(torch.float32, "cpu", 8), set(threading.enumerate())
    with pytest.raises(RuntimeError, match=r"status 3; .*\nno kernels"):
        SGLangEngine.from_pretrained(str(folder), AutoTokenizer.from_pretrained(folder), options)
    assert not any("rollout servers" in thread.name for thread in {*threading.enumerate()} - before)


def test_a_process_is_ended_with_all_it_has_started(monkeypatch):
    monkeypatch.setattr("atomrl.engines.server_process.GRACE_S", 120.0)  # which only one that is deaf takes
    code = "import subprocess as s, sys; p = s.Popen([sys.executable, '-c', 'import time; time.sleep(99)']);"
    code += "print(p.pid, flush=True); p.wait()"
    process = ServerProcess(lambda port: ([sys.executable, "-c", code], {}))
    while not process.tail():
        time.sleep(0.05)
    child = int(process.tail())
    assert alive(child)
    began = time.monotonic()
    process.end()
    assert time.monotonic() - began < 60, "as if it was deaf"
    end = time.monotonic() + 120
    while alive(child) and time.monotonic() < end:
        time.sleep(0.05)
    assert not alive(child)


def test_shared_memory_of_a_server_that_has_to_be_killed_goes_with_it():
    code = "import signal, time; from multiprocessing.shared_memory import SharedMemory as S; "
    code += "signal.signal(15, signal.SIG_IGN); m = S(create=True, size=9); print(m.name, flush=True); time.sleep(99)"
    process = ServerProcess(lambda port: ([sys.executable, "-c", code], {}))
    while not process.tail():
        time.sleep(0.05)
    name = Path("/dev/shm") / process.tail()
    assert name.exists()
    process.end()
    assert not name.exists()


def test_a_run_trains_with_servers_that_are_there(fakes, tmp_path, folder):
    from atomrl.cli.main import main

    one, two = fakes(), fakes()
    settings = {
        "run_name": "served", "output_dir": str(tmp_path), "model.path": str(folder), "model.dtype": "float32",
        "data.train": "chain", "data.train_size": 40, "rollout.engine": "sglang",
        "rollout.server": f"[{one.url},{two.url}]",
        "rollout.prompts_per_step": 2, "rollout.completions_per_prompt": 4, "rollout.max_completion_tokens": 6,
        "train.steps": 2, "reward.functions": "[strict_math]",
    }  # fmt: skip
    config = tmp_path / "config.yaml"
    config.write_text("{}\n")
    overrides = [f"{key}={value}" for key, value in settings.items()]
    assert main(["train", str(config), *overrides]) == 0
    assert one.label == two.label and one.label.startswith("2@")  # the weights of the last update
    assert {one.calls.count("/update_weights_from_disk"), two.calls.count("/update_weights_from_disk")} == {3}


class FakeVLLM(ThreadingHTTPServer):
    """Answers as a vLLM server of two workers does that has one weight, and is asked for no completion."""

    def __init__(self, extension="", multimodal=None):
        super().__init__(("127.0.0.1", 0), FakeVLLMHandler)
        model = {"logprobs_mode": "processed_logprobs", "max_logprobs": -1, "multimodal_config": multimodal}
        config = {
            "model_config": model, "lora_config": None, "parallel_config": {"worker_extension_cls": extension},
        }  # fmt: skip
        self.answers = {
            "/server_info": {"vllm_config": config}, "/version": {"version": VLLMServerEngine.least_version},
            "/reset_prefix_cache": {"success": True}, "/collective_rpc": {"results": [[["w", "float32", 7]]] * 2},
        }  # fmt: skip
        threading.Thread(target=self.serve_forever, daemon=True).start()


class FakeVLLMHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path == "/update_weight_version":
            self.server.answers["/weight_info"] = {"weight_version": json.loads(body)["new_version"]}
        answer = json.dumps(self.server.answers.get(self.path.partition("?")[0], {})).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST

    def log_message(self, *args):
        pass


@pytest.mark.parametrize("extension", [WORKER_EXTENSION, ""])
def test_hashes_of_several_vllm_workers_are_combined(folder, extension):
    """Only workers with our extension read weights back."""
    server = FakeVLLM(extension)
    options = EngineOptions(torch.float32, "cpu", 4, server=(f"http://127.0.0.1:{server.server_port}",))
    engine = VLLMServerEngine.from_pretrained(str(folder), AutoTokenizer.from_pretrained(folder), options)
    hashes = [(held.name, held.value) for held in engine.weight_hashes()]
    assert hashes == ([("w", 7), ("w", 7)] if extension else [(name, None) for name in engine.shapes])
    engine.close()
    server.shutdown()
    server.server_close()


PATCHES = {"language_model_only": False, "mm_device_do_normalize": False}


@pytest.mark.parametrize("own, multimodal, words", [
    (None, PATCHES, "is vLLM 0.32, and this process has none: pictures are encoded by vLLM, so both"),
    ("0.33.1", PATCHES, "is vLLM 0.32, and this process has vLLM 0.33.1"),
    ("0.32", None, "reads text alone"),
    ("0.32+cpu", PATCHES | {"language_model_only": True}, "reads text alone"),
    ("0.32+cpu", PATCHES | {"mm_device_do_normalize": True}, "would normalize pictures twice: start it with --no-mm"),
])  # fmt: skip
def test_a_vllm_server_that_reads_pictures_otherwise_is_refused(folder, monkeypatch, own, multimodal, words):
    monkeypatch.setattr(VLLMServerEngine, "package_version", classmethod(lambda cls: own))
    server = FakeVLLM(multimodal=multimodal)
    url = f"http://127.0.0.1:{server.server_port}"
    assert words in VLLMServerEngine.server_image_refusal(url)
    options = EngineOptions(torch.float32, "cpu", 4, server=(url,), images=object())
    with pytest.raises(RuntimeError, match=re.escape(f"{url} {words}")):
        VLLMServerEngine.from_pretrained(str(folder), AutoTokenizer.from_pretrained(folder), options)
    server.shutdown()
    server.server_close()
    assert VLLMServerEngine.server_image_refusal(url) is None  # unknown
