"""Layers with adapters: against peft's own layer, the reference policy, and the products that they launch."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from atomrl.config import LoraConfig
from atomrl.models.gpt import new_gpt
from atomrl.models.lora import adapters_disabled, add_adapters

pytest.importorskip("peft")
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear")


def policy(dtype, seed=0, dropout=0.0, targets="all-linear"):
    model = new_gpt(vocab_size=64, layers=2, hidden=64, heads=4, kv_heads=2, family="qwen2", seed=seed)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    torch.manual_seed(seed)
    add_adapters(model, LoraConfig(rank=8, alpha=16, dropout=dropout, target_modules=targets), "base")
    return model


def started(model):
    """As after some updates: B is no longer zero."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(0, 0.05)
    return model


def as_peft(model):
    """The same model, with peft's own forward pass."""
    for module in model.modules():
        if hasattr(module, "lora_A"):
            del module.forward
            module.base_layer = torch.nn.Sequential(module.base_layer)  # no matrix that `adapted_linear` knows
    return model


def states_and_gradients(model, tokens):
    states = model.forward_hidden(tokens)
    states.float().square().mul(torch.linspace(0, 1, states.shape[-1])).sum().backward()
    grads = [parameter.grad.flatten() for parameter in model.parameters() if parameter.requires_grad]
    return states.detach().float(), torch.cat(grads)


@pytest.fixture
def tokens():
    return torch.randint(0, 64, (3, 11), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"]], ids=str)
def test_in_float32_it_is_peft_own_layer(tokens, targets):
    ours, theirs = (started(policy(torch.float32, targets=targets)) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    for actual, expected in zip(
        states_and_gradients(ours, tokens), states_and_gradients(as_peft(theirs), tokens), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_in_bfloat16_it_is_as_near_to_float32_as_peft_own_layer(tokens):
    ours, theirs, wide = started(policy(torch.bfloat16)), policy(torch.bfloat16), policy(torch.float32)
    theirs.load_state_dict(ours.state_dict())
    wide.load_state_dict({name: tensor.float() for name, tensor in ours.state_dict().items()})
    truth = states_and_gradients(wide, tokens)[1]
    near, far = (states_and_gradients(model, tokens)[1] - truth for model in (ours, as_peft(theirs)))
    assert near.norm() <= 1.25 * far.norm() and far.norm() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_before_the_first_update_the_policy_is_its_reference_to_the_bit(tokens, dtype):
    model = policy(dtype)
    states = model.forward_hidden(tokens)
    with adapters_disabled(model):
        assert torch.equal(model.forward_hidden(tokens), states)


def test_dropout_is_of_the_adapters_input_alone(tokens):
    model = started(policy(torch.float32, dropout=0.5)).train()
    assert not torch.equal(model.forward_hidden(tokens), model.forward_hidden(tokens))
    with adapters_disabled(model):
        assert torch.equal(model.forward_hidden(tokens), model.forward_hidden(tokens))
    model.eval()
    assert torch.equal(model.forward_hidden(tokens), model.forward_hidden(tokens))


class Products(TorchDispatchMode):
    """Notes the dtypes of all matrix products."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__.rstrip("_") in PRODUCTS:
            self.dtypes += [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]
        return func(*args, **(kwargs or {}))


def test_no_product_of_a_bfloat16_policy_is_in_float32(tokens):
    model = started(policy(torch.bfloat16))
    with Products() as products:
        states_and_gradients(model, tokens)
    assert len(products.dtypes) > 100 and set(products.dtypes) == {torch.bfloat16}
