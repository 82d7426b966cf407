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
from atomrl.engines.generation import generate
from atomrl.engines.replicas import ReplicatedEngine
from atomrl.engines.vllm import VLLMEngine
from atomrl.engines.vllm_server import VLLMServerEngine
from atomrl.models.loading import load_policy, model_weights
from atomrl.protocols import WeightUpdate
from tests.prompts import logprobs_of, response
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
    """The features of a picture are of the weights that sample."""
    policy = load_policy(case.path, dtype="float32", freeze_vision=False)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    case.engine.update_weights(WeightUpdate(version=1, tensors=list(model_weights(policy))))
    trajectories = generate(case.engine, case.prompts, case.sampling)
    from atomrl.models.vision import Vision

    policy.vision = Vision(policy.inner, case.reader)
    for trajectory in trajectories:
        tokens = torch.tensor([trajectory.token_ids])
        hidden = policy.forward_hidden(tokens, [trajectory.problem.images])
        logits = hidden[0] @ policy.head_weight.T
        drawn = torch.log_softmax(logits, -1)[trajectory.prompt_tokens - 1 : -1]
        own = drawn.gather(-1, torch.tensor(response(trajectory))[:, None])[:, 0]
        assert logprobs_of(trajectory) == pytest.approx(own.tolist(), abs=1e-4)


def test_a_picture_that_is_not_there_is_named(case):
    """Last, since the engine is left with the request."""
    prompt = case.prompts[0]
    gone = replace(prompt.problem.images[0], name=f"{'0' * 64}.png")
    with pytest.raises(DataError, match=rf"{gone.name} .* cannot be read on .* must see its folder \(output_dir\)"):
        generate(case.engine, [replace(prompt, problem=replace(prompt.problem, images=(gone,)))], case.sampling)
