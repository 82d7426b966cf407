"""Pictures in vLLM, in this process, behind its server, and in a Ray actor: it reads what the trainer reads."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from atomrl.cluster.ray_cluster import RayCluster
from atomrl.config import ClusterConfig
from atomrl.data.files import DataError
from atomrl.engines.generation import generate, requests_of
from atomrl.engines.replicas import ReplicatedEngine
from atomrl.engines.vllm import VLLMEngine
from atomrl.engines.vllm_server import VLLMServerEngine
from atomrl.models.loading import load_policy, model_weights
from atomrl.models.vision import Vision
from atomrl.protocols import WeightUpdate
from tests.prompts import response
from tests.tiny_vision import SPECIAL
from tests.vision.test_conformance import Case

pytestmark = [
    pytest.mark.usefixtures("vllm"),
    pytest.mark.skipif(find_spec("torchvision") is None, reason="vLLM's class imports torchvision"),
]


def in_process(path, tokenizer, options):
    return VLLMEngine.from_pretrained(path, tokenizer, replace(options, whole_logprobs=True))


def server(path, tokenizer, options):
    return VLLMServerEngine.from_pretrained(path, tokenizer, replace(options, whole_logprobs=True))


def actor(path, tokenizer, options):
    pytest.importorskip("ray", reason="Ray is not installed; `make distributed` has it")
    settings = ClusterConfig(replicas=1, resources={"rollout": {"num_cpus": 0.1}})
    return ReplicatedEngine(partial(in_process, path, tokenizer, options), RayCluster(settings, ["rollout"]))


@pytest.fixture(scope="module", params=[in_process, server, actor], ids=lambda start: start.__name__)
def case(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_HOST_IP", "127.0.0.1")
        case = Case("qwen2_5_vl", tmp_path_factory.mktemp("pictures"), start=request.param, wide=True)
        with closing(case.engine):
            yield case


def test_log_probs_of_vllm_and_trainer_agree(case):
    """With one picture, two of different sizes, and none; the prompt's tokens are those of the row."""
    for trajectory, prompt in zip(case.trajectories[::2], case.prompts, strict=True):
        assert trajectory.token_ids[: trajectory.prompt_tokens] == prompt.token_ids
    difference = case.difference()
    assert difference < 4e-5


def test_tokens_of_pictures_are_never_sampled(case):
    banned = range(2, len(SPECIAL))
    assert not any(token in banned for each in case.trajectories for token in response(each))


def test_a_trained_tower_forgets_the_features_before(case):
    """The features of a picture are of the weights that sample, also in completions that were running."""
    policies = [load_policy(case.path, dtype="float32", freeze_vision=False) for _ in range(2)]
    with torch.no_grad():
        for weight in policies[1].parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    sampling = replace(case.sampling, max_completion_tokens=40)
    requests = {each.request_id: each for prompt in case.prompts for each in requests_of(prompt, sampling)}
    outputs = []
    case.engine.submit([*requests.values()])
    for _ in range(3):
        outputs += case.engine.poll(0)
    case.engine.update_weights(WeightUpdate(version=1, tensors=list(model_weights(policies[1]))))
    while len(outputs) < len(requests):
        outputs += case.engine.poll()
    case.engine.submit([*requests.values()])
    while len(outputs) < 2 * len(requests):
        outputs += case.engine.poll()
    versions = {tuple(part.policy_version for part in output.segments) for output in outputs}
    assert (1,) in versions and (not isinstance(case.engine, VLLMEngine) or (0, 1) in versions)
    for policy in policies:
        policy.vision = Vision(policy.inner, case.reader)
    for output in outputs:
        request = requests[output.request_id]
        tokens = [*request.prompt_token_ids, *(token for part in output.segments for token in part.token_ids)]
        at = len(request.prompt_token_ids)
        for part in output.segments:
            policy = policies[part.policy_version]
            hidden = policy.forward_hidden(torch.tensor([tokens]), [request.images])[0]
            drawn = torch.log_softmax(hidden @ policy.head_weight.T, -1)[at - 1 : at - 1 + len(part.token_ids)]
            own = drawn.gather(-1, torch.tensor(part.token_ids)[:, None])[:, 0]
            assert part.logprobs == pytest.approx(own.tolist(), abs=1e-4)
            at += len(part.token_ids)


def test_a_picture_that_is_not_there_is_named(case):
    """Last, since the engine is left with the request."""
    prompt = case.prompts[0]
    gone = replace(prompt.problem.images[0], name=f"{'0' * 64}.png")
    with pytest.raises(DataError, match=rf"{gone.name} .* cannot be read on .* must see its folder \(output_dir\)"):
        generate(case.engine, [replace(prompt, problem=replace(prompt.problem, images=(gone,)))], case.sampling)
