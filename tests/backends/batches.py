"""Training batches and a plain policy-gradient record, for tests of back ends."""

from types import SimpleNamespace

import torch

from atomrl.batches import TrainingBatch
from atomrl.common.metrics import Mean, Sum
from atomrl.protocols import LossOutput


def make_batch(rows=6, longest=14, vocabulary=90, seed=0, **changes):
    """Ragged random rows: prompts of 3 tokens, completions of 1 to `longest - 3`, groups of two."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(4, longest + 1, (rows,), generator=generator)
    lengths[0] = longest
    tokens = torch.randint(3, vocabulary, (rows, longest), generator=generator)  # transformers freezes the pad token
    at = torch.arange(longest)[None]
    mask = (at >= 3) & (at < lengths[:, None])
    advantages = torch.randn(rows, generator=generator)
    fields = {
        "tokens": tokens * (at < lengths[:, None]),
        "loss_mask": mask,
        "lengths": lengths,
        "prompt_lengths": torch.full((rows,), 3),
        "group_ids": torch.arange(rows) // 2,
        "rewards": advantages,
        "truncated": torch.zeros(rows, dtype=torch.bool),
        "advantages": advantages[:, None] * mask,
        "loss_weights": mask / mask.sum(),
    }
    return TrainingBatch(**(fields | changes))


def loss(outputs, batch):
    """-sum w A log p, and an entropy bonus where there is an entropy."""
    value = -(batch.loss_weights * batch.advantages * outputs.logprobs).sum()
    metrics = {"actor/pg_loss": Sum(value.item())}
    if outputs.entropy is not None:
        value = value - 0.1 * (batch.loss_weights * outputs.entropy).sum()
        tokens = float(batch.loss_mask.sum())
        metrics["actor/entropy"] = Mean((outputs.entropy.detach() * batch.loss_mask).sum().item(), tokens)
    return LossOutput(loss=value, metrics=metrics, token_records={"advantage": batch.advantages})


def make_algorithm(**changes):
    """The members of an `Algorithm` that a back end uses."""
    plain = {
        "name": "plain",
        "loss": loss,
        "outputs": frozenset({"logprobs"}),
        "row_unit": "row",
        "update": None,
        "needs": frozenset(),
    }
    return SimpleNamespace(**(plain | changes))


def written(wait):
    """Wait for what `save` began, where the back end writes beside its steps."""
    if wait is not None:
        wait()


def weights_of(backend):
    """The trained model's weights by published name, adapters merged; not copied."""
    update, weights = backend.weight_update(0), {}
    for name, tensor in update.tensors:
        adapter = update.adapters.get(name)
        if adapter is not None:
            added = adapter.scale * adapter.b @ adapter.a
            tensor = tensor + (added if added.shape == tensor.shape else added.T)  # GPT-2 keeps them transposed
        weights[name] = tensor
    return weights


def follow_outputs(backend, act):
    """Pass the outputs of each forward pass through `act(micro, outputs)`, which returns them, or others, or raises."""
    forward = backend.forward
    backend.forward = lambda micro, names: act(micro, forward(micro, names))
