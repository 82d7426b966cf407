"""SGLang's HTTP interface (0.5.23) on a small model, for tests.

It refuses what SGLang does not know, and what goes wrong there without a word.

It shares no code with the engines: each token is a forward pass of transformers over all that came before.
"""

from __future__ import annotations

import hashlib
import json
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import distributed_c10d as c10d
from transformers import AutoModelForCausalLM, AutoTokenizer

NUMBER, WHOLE, TRUTH, WORDS, TEXT = (int, float), (int,), (bool,), (list,), (str,)
SAMPLING = {
    "max_new_tokens": WHOLE, "min_new_tokens": WHOLE, "temperature": NUMBER, "top_p": NUMBER, "top_k": WHOLE,
    "min_p": NUMBER,
    "stop": WORDS, "stop_token_ids": WORDS, "ignore_eos": TRUTH, "no_stop_trim": TRUTH, "skip_special_tokens": TRUTH,
    "sampling_seed": WHOLE,
}  # fmt: skip
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "/generate": {
        "rid": TEXT, "input_ids": WORDS, "sampling_params": (dict,), "return_logprob": TRUTH, "lora_path": TEXT,
        "return_sampling_mask": TRUTH, "sampling_logprobs_mode": TEXT,
    },
    "/abort_request": {"rid": TEXT, "abort_all": TRUTH},
    "/pause_generation": {"mode": TEXT},
    "/continue_generation": {"torch_empty_cache": TRUTH},
    "/update_weights_from_disk": {"model_path": TEXT, "weight_version": TEXT, "flush_cache": TRUTH},
    "/init_weights_update_group": {
        "master_address": TEXT, "master_port": WHOLE, "rank_offset": WHOLE, "world_size": WHOLE, "group_name": TEXT,
        "backend": TEXT,
    },
    "/begin_weight_update": {},
    "/update_weights_from_distributed": {
        "names": WORDS, "dtypes": WORDS, "shapes": WORDS, "group_name": TEXT, "flush_cache": TRUTH,
    },
    "/end_weight_update": {},
    "/weights_checker": {"action": TEXT},
    "/update_weight_version": {"new_version": TEXT, "abort_all_requests": TRUTH},
    "/load_lora_adapter": {"lora_name": TEXT, "lora_path": TEXT},
    "/unload_lora_adapter": {"lora_name": TEXT},
}  # fmt: skip
REQUIRED = {
    "/generate": {"input_ids", "sampling_params"},
    "/update_weights_from_disk": {"model_path"},
    "/init_weights_update_group": {"master_address", "master_port", "rank_offset", "world_size"},
    "/update_weights_from_distributed": {"names", "dtypes", "shapes"},
    "/update_weight_version": {"new_version"},
    "/load_lora_adapter": {"lora_name", "lora_path"},
    "/unload_lora_adapter": {"lora_name"},
}


class Refused(Exception):
    """A request that SGLang answers with status 400."""


def check(body: Any, known: dict[str, tuple[type, ...]], required: set[str], where: str) -> None:
    if not isinstance(body, dict):
        raise Refused(f"{where}: not an object")
    if unknown := body.keys() - known.keys():
        raise Refused(f"{where}: unknown field `{min(unknown)}`")
    if missing := required - body.keys():
        raise Refused(f"{where}: missing field `{min(missing)}`")
    for name, value in body.items():
        if isinstance(value, bool) != (known[name] == TRUTH) or not isinstance(value, known[name]):
            raise Refused(f"{where}: {name} is {value!r}")


@dataclass(eq=False)
class Request:
    rid: str
    prompt: list[int]
    params: dict[str, Any]
    adapter: str | None
    mask: bool
    seed: int
    done: threading.Event = field(default_factory=threading.Event)
    drawn: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support: list[tuple[list[int], list[float]]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    reason: dict[str, Any] | None = None


class FakeSGLang:
    """A server on a port of its own; `calls` are the paths that were asked for.

    Args:
        path: the model.
        deterministic: as `--enable-deterministic-inference`; without, seeds of requests are ignored.
        port: 0: any that is free.
    """

    def __init__(self, path: str, deterministic: bool = True, port: int = 0):
        self.path, self.deterministic = path, deterministic
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.eos = self.model.generation_config.eos_token_id
        self.context = self.model.config.max_position_embeddings
        self.label, self.paused, self.alive, self.hangs = "default", None, True, False
        self.adapters: dict[str, Any] = {}
        self.groups: dict[str, Any] = {}
        self.came: set[str] | None = None
        """Names of the weights of a session."""
        self.most = math.inf
        """How many tokens a request has at most, until a test raises it."""
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self.calls: list[str] = []
        self.wakes = threading.Condition()
        self.seeds = 0
        handler = type("Handler", (Handler,), {"fake": self})
        self.server = Listener(("127.0.0.1", port), handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.threads = [threading.Thread(target=run, daemon=True) for run in (self.server.serve_forever, self.work)]
        for thread in self.threads:
            thread.start()

    def close(self) -> None:
        """As if it was killed: what is under way gets no answer."""
        with self.wakes:
            self.alive = self.hangs = False
            for request in self.running + self.waiting:
                request.done.set()
            self.wakes.notify_all()
        self.server.shutdown()
        self.server.server_close()
        for connection in list(self.server.connections):
            with suppress(OSError):  # it has gone
                connection.shutdown(socket.SHUT_RDWR)

    # The scheduler.

    def work(self) -> None:
        while self.alive:
            with self.wakes:
                self.wakes.wait_for(lambda: not self.alive or (not self.paused and (self.drawable() or self.waiting)))
                self.running += self.waiting
                self.waiting.clear()
                rows = self.drawable()
                for adapter in {request.adapter for request in rows} if self.alive else ():
                    self.step([request for request in rows if request.adapter == adapter])
                self.running = [request for request in self.running if request.reason is None]
            time.sleep(0.001)  # else no other thread would ever have the lock

    def drawable(self) -> list[Request]:
        return [request for request in self.running if len(request.drawn) < self.most]

    @contextmanager
    def at_most(self, tokens: int) -> Iterator[None]:
        """Draw at most so many tokens of a request until the block ends, however long that takes."""
        self.most = tokens
        try:
            yield
        finally:
            with self.wakes:
                self.most = math.inf
                self.wakes.notify_all()

    def wait_for_tokens(self, requests: int) -> None:
        """Wait until so many requests have the tokens of `at_most`."""
        while len(self.running) < requests or self.drawable():
            time.sleep(0.005)

    @torch.inference_mode()
    def step(self, requests: list[Request]) -> None:
        """Draw one token for each."""
        rows = [request.prompt + request.drawn for request in requests]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
        model = self.model if requests[0].adapter is None else self.adapters[requests[0].adapter]
        last = torch.tensor([len(row) - 1 for row in rows])
        logits = model(input_ids=ids, attention_mask=mask).logits[torch.arange(len(rows)), last]
        for request, scores in zip(requests, logits, strict=True):
            self.draw(request, scores)

    def draw(self, request: Request, scores: torch.Tensor) -> None:
        params, place = request.params, len(request.drawn)
        temperature, top_k = params.get("temperature", 1.0), params.get("top_k", -1)
        if temperature == 0:
            temperature, top_k = 1.0, 1
        stops = set() if params.get("ignore_eos") else {*params.get("stop_token_ids", []), self.eos}
        if place < params.get("min_new_tokens", 0):
            scores = scores.index_fill(0, torch.tensor(sorted(stops), dtype=torch.int64), -torch.inf)
        logprobs = (scores / temperature).log_softmax(-1)
        order = logprobs.argsort(descending=True)
        kept = logprobs[order[:top_k] if top_k > 0 else order].exp()
        kept = kept[(logprobs[order].exp().cumsum(-1) - logprobs[order].exp())[: len(kept)] < params.get("top_p", 1.0)]
        generator = torch.Generator().manual_seed((request.seed * 1_000_003 + place) % 2**63)
        finite = not logprobs.isnan().any()
        token = int(order[torch.multinomial(kept, 1, generator=generator)]) if finite else 0
        request.drawn.append(token)
        request.labels.append(self.label)
        request.logprobs.append(float(logprobs[token]))
        if request.mask:
            request.support.append((order[: len(kept)].tolist(), (kept / kept.sum()).log().tolist()))
        text = self.tokenizer.decode(request.drawn)
        if token in stops:
            self.finish(request, {"type": "stop", "matched": token})
        elif matched := [stop for stop in params.get("stop", []) if stop in text]:
            self.finish(request, {"type": "stop", "matched": matched[0]})
        elif place + 1 >= min(params.get("max_new_tokens", 128), self.context - len(request.prompt)):
            self.finish(request, {"type": "length", "length": place + 1})

    def finish(self, request: Request, reason: dict[str, Any]) -> None:
        request.reason = reason
        request.done.set()

    # The interface.

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        params = body["sampling_params"]
        check(params, SAMPLING, set(), "sampling_params")
        if not body["input_ids"] or not all(type(token) is int for token in body["input_ids"]):
            raise Refused("input_ids")
        mask = body.get("return_sampling_mask", False)
        if mask and not 1 <= params.get("top_k", -1) <= 4096:
            raise Refused("return_sampling_mask requires top_k=1 for greedy sampling or finite 1 < top_k <= 4096")
        if body.get("sampling_logprobs_mode", "support") != "support" or ("sampling_logprobs_mode" in body) != mask:
            raise Refused("sampling_logprobs_mode can only be set when return_sampling_mask=true")
        adapter = body.get("lora_path")
        with self.wakes:
            if adapter is not None and adapter not in self.adapters:
                raise Refused(f"lora {adapter} is not loaded")
            if any(other.rid == body.get("rid") for other in self.running + self.waiting):
                raise Refused("Duplicate request ID")
            self.seeds += 1
            if not self.alive:
                raise ConnectionAbortedError
            seed = params.get("sampling_seed", 42) if self.deterministic else self.seeds
            request = Request(body.get("rid", ""), body["input_ids"], params, adapter, mask, seed)
            self.waiting.append(request)
            self.wakes.notify_all()
        request.done.wait()
        if request.reason is None:
            raise ConnectionAbortedError
        return self.answer(request, body.get("return_logprob", False))

    def answer(self, request: Request, logprobs: bool) -> dict[str, Any]:
        spans: list[dict[str, Any]] = []
        for place, label in enumerate(request.labels):
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": place, "end": place})
            spans[-1]["end"] = place + 1
        meta: dict[str, Any] = {
            "id": request.rid, "finish_reason": request.reason, "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.drawn), "cached_tokens": 0, "weight_version": self.label,
            "weight_versions": spans or [{"version": self.label, "start": 0, "end": 0}],
        }  # fmt: skip
        if logprobs:
            pairs = zip(request.logprobs, request.drawn, strict=True)
            meta["output_token_logprobs"] = [[value if value == value else None, token, None] for value, token in pairs]
        if request.mask:
            meta["output_token_sampling_mask"] = [ids for ids, _ in request.support]
            meta["output_token_sampling_logprobs"] = [values for _, values in request.support]
        return {"text": self.tokenizer.decode(request.drawn), "output_ids": request.drawn, "meta_info": meta}

    def abort_request(self, body: dict[str, Any]) -> None:
        if not body.get("abort_all") and not body.get("rid"):
            raise Refused("abort_request with an empty rid does nothing")
        for request in [*self.running, *self.waiting]:
            if body.get("abort_all") or request.rid == body["rid"]:
                self.finish(request, {"type": "abort", "message": "Aborted"})
        self.running = [request for request in self.running if request.reason is None]
        self.waiting = [request for request in self.waiting if request.reason is None]

    def pause_generation(self, body: dict[str, Any]) -> dict[str, str]:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise Refused(f"mode {mode}")
        if mode == "abort":
            self.abort_request({"abort_all": True})
        self.paused = mode
        return {"message": "Generation paused successfully.", "status": "ok"}

    def continue_generation(self, body: dict[str, Any]) -> dict[str, str]:
        if not self.paused:
            raise Refused("continue_generation without pause_generation")
        self.paused = None
        return {"message": "Generation continued successfully.", "status": "ok"}

    def update_weights_from_disk(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.running and self.paused != "retract":
            raise Refused("weights change under requests that run: SGLang waits for them, or mixes their cache")
        if not body.get("flush_cache", True):
            raise Refused("the cache would be of the weights before")
        state = load_file(Path(body["model_path"]) / "model.safetensors")
        own = self.model.state_dict()
        if missing := own.keys() - state.keys():
            raise Refused(f"{min(missing)} would stay as it is, without a word")
        if wrong := [name for name in state if name not in own or state[name].shape != own[name].shape]:
            raise Refused(f"{wrong[0]} does not fit")
        self.model.load_state_dict(state)
        self.label = body.get("weight_version", self.label)
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def init_weights_update_group(self, body: dict[str, Any]) -> dict[str, Any]:
        """As SGLang does it: rendezvous, and torch's own helper, without a default group here."""
        name, rank, size = body["group_name"], body["rank_offset"], body["world_size"]
        url = f"tcp://{body['master_address']}:{body['master_port']}"
        store, rank, size = next(dist.rendezvous(url, rank, size, timeout=timedelta(seconds=60)))
        self.groups[name], _ = c10d._new_process_group_helper(
            size, rank, [], dist.Backend(body["backend"]), dist.PrefixStore(name, store), group_name=name,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
        return {"success": True, "message": "Succeeded to initialize custom process group."}

    def begin_weight_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.came is not None:
            raise Refused("a weight-update session is already open; call end_weight_update() first")
        self.came = set()
        return {"success": True, "message": "Success"}

    def update_weights_from_distributed(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.came is None:
            raise Refused("must run between begin_weight_update() and end_weight_update()")
        if self.running and self.paused != "retract":
            raise Refused("weights change under requests that run: SGLang waits for them, or mixes their cache")
        if body["group_name"] not in self.groups:
            raise Refused(f"Group {body['group_name']} not in {list(self.groups)}")
        own = self.model.state_dict()
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            if name not in own or list(own[name].shape) != shape:
                raise Refused(f"{name} does not fit")
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            try:
                self.groups[body["group_name"]].broadcast([tensor], dist.BroadcastOptions()).wait()
            except RuntimeError as error:
                raise Refused(f"Failed to receive weights: {error}") from None
            own[name].copy_(tensor)
        self.came |= set(body["names"])
        if self.came == own.keys() and not body.get("flush_cache", True):
            raise Refused("the cache would be of the weights before")
        return {"success": True, "message": "Succeeded to update parameter online."}

    def end_weight_update(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.came is None:
            raise Refused("no weight-update session is open; call begin_weight_update() first")
        missing, self.came = self.model.state_dict().keys() - self.came, None
        if missing:
            raise Refused(f"{min(missing)} would stay as it is, without a word")
        return {"success": True, "message": "Success"}

    def weights_checker(self, body: dict[str, Any]) -> dict[str, Any]:
        """SGLang's own parameters: stacked, the vocabulary filled up, a tied head once."""
        if body.get("action", "checksum") != "checksum":
            raise Refused("snapshot, reset_tensors and compare are for its own tests")
        own = dict(self.model.named_parameters())
        for name in list(own):
            for whole, parts in (("qkv_proj", "q_proj k_proj v_proj"), ("gate_up_proj", "gate_proj up_proj")):
                first, *rest = parts.split()
                if f".{first}." in name:
                    stacked = [own.pop(name), *(own.pop(name.replace(first, other)) for other in rest)]
                    own[name.replace(first, whole)] = torch.cat(stacked)
            if name in ("model.embed_tokens.weight", "lm_head.weight"):
                own[name] = torch.cat([own[name], own[name].new_zeros(-len(own[name]) % 64, own[name].shape[1])])
        sums = {name: hashlib.sha256(t.detach().numpy().tobytes()).digest()[:8].hex() for name, t in own.items()}
        return {"success": True, "message": "Success.", "ranks": [{"checksums": sums, "per_gpu_checksum": "-"}]}

    def update_weight_version(self, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("abort_all_requests", True):
            self.abort_request({"abort_all": True})
        self.label = body["new_version"]
        return {"success": True, "message": "Weight version updated", "new_version": self.label}

    def load_lora_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        name, folder = body["lora_name"], Path(body["lora_path"])
        if name in self.adapters:
            raise Refused(f"LoRA {name} is loaded already")
        settings = json.loads((folder / "adapter_config.json").read_text())
        pairs = load_file(folder / "adapter_model.safetensors")
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        model.load_state_dict(self.model.state_dict())
        for key in pairs:
            if key.endswith(".lora_A.weight"):
                layer = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                change = pairs[key.replace("lora_A", "lora_B")] @ pairs[key] * settings["lora_alpha"] / settings["r"]
                with torch.no_grad():
                    model.get_submodule(layer).weight += change
        self.adapters[name] = model
        return {"success": True, "error_message": None, "loaded_adapters": {name: str(folder)}}

    def unload_lora_adapter(self, body: dict[str, Any]) -> dict[str, Any]:
        name = body["lora_name"]
        if name not in self.adapters or any(request.adapter == name for request in self.running + self.waiting):
            raise Refused(f"LoRA {name} is not loaded, or in use: SGLang waits until it is not")
        del self.adapters[name]
        return {"success": True, "error_message": None, "loaded_adapters": {}}

    def about(self, path: str) -> Any:
        if path == "/health":
            return {}
        if path == "/model_info":
            return {"model_path": self.path, "weight_version": self.label, "is_generation": True}
        if path == "/server_info":
            return {
                "version": "0.5.23", "enable_lora": True, "enable_deterministic_inference": self.deterministic,
                "max_lora_rank": 4, "model_path": self.path, "device": "cpu", "tp_size": 1,
            }  # fmt: skip
        raise FileNotFoundError(path)


class Listener(ThreadingHTTPServer):
    request_queue_size = 1024
    daemon_threads = True

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.connections: WeakSet[socket.socket] = WeakSet()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.add(request)
        super().process_request(request, client_address)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    fake: FakeSGLang

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.serve(lambda: self.fake.about(self.path))

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.serve(lambda: self.post(json.loads(content) if content else {}))

    def post(self, body: Any) -> Any:
        if self.path not in FIELDS:
            raise FileNotFoundError(self.path)
        check(body, FIELDS[self.path], REQUIRED.get(self.path, set()), self.path)
        act = getattr(self.fake, self.path[1:])
        if self.path == "/generate":
            return act(body)
        with self.fake.wakes:
            response = act(body)
            self.fake.wakes.notify_all()
        return response

    def serve(self, act: Any) -> None:
        self.fake.calls.append(self.path)
        while self.fake.hangs and self.fake.alive:
            time.sleep(0.05)
        try:
            status, response = 200, act()
        except Refused as error:
            status, response = 400, {"error": str(error)}
        except FileNotFoundError as error:
            status, response = 404, {"detail": f"Not Found {error}"}
        except ConnectionAbortedError:
            self.close_connection = True
            self.connection.close()
            return
        content = b"" if response is None else json.dumps(response).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
        except OSError:  # who asked has gone
            self.close_connection = True
