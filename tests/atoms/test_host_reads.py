"""Atoms of a training step never wait for the device: they read no number of a tensor on the host.

Fake tensors have shapes and no numbers, so that any read (`int`, `bool`, a boolean index) raises an error.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from atomrl.atoms import advantages, kl, masks, policy_losses, shaping, token_filters
from atomrl.atoms import advantages as baselines
from atomrl.atoms import auxiliary_losses as value_losses
from atomrl.atoms import masks as whiten
from atomrl.atoms import policy_losses as importance_sampling
from atomrl.atoms import policy_losses as reductions
from atomrl.atoms import policy_losses as trust_region
from atomrl.atoms import returns as gae

READS = (DataDependentOutputException, DynamicOutputShapeException)
ATOMS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "token_mean": lambda x, m: reductions.token_mean(m),
    "sequence_mean": lambda x, m: reductions.sequence_mean(m),
    "constant_length": lambda x, m: reductions.constant_length(m, 4),
    "weighted_sum": lambda x, m: reductions.weighted_sum(x, x, m),
    "masked_mean": masks.masked_mean,
    "row_max": masks.row_max,
    "masked_whiten": whiten.masked_whiten,
    "gae": lambda x, m: gae.gae(x, x, m),
    "length_adaptive_lambda": lambda x, m: gae.length_adaptive_lambda(m, 0.05),
    "per_token": lambda x, m: advantages.per_token(x[:, 0], m),
    "standardised": lambda x, m: advantages.standardised(x[:, 0], x[:, 1]),
    "rescaled_by_share": lambda x, m: baselines.rescaled_by_share(x[:, 0], m[:, 1]),
    "reward_at_last_token": lambda x, m: shaping.reward_at_last_token(x[:, 0], m),
    "soft_overlong_penalty": lambda x, m: shaping.soft_overlong_penalty(m.sum(1), 9, 4),
    "token_ratio": lambda x, m: policy_losses.token_ratio(x, x, m, 20.0),
    "sequence_token_log_ratio": lambda x, m: policy_losses.sequence_token_log_ratio(x, x, m, 10.0),
    "k3_kl": lambda x, m: kl.k3_kl(x, x, m),
    "clipped_policy_loss": lambda x, m: policy_losses.clipped_policy_loss(x, x, dual_clip=3.0),
    "sapo_loss": lambda x, m: policy_losses.sapo_loss(x, x),
    "cispo_loss": lambda x, m: policy_losses.cispo_loss(x, x, x, m),
    "clipped_value_loss": lambda x, m: value_losses.clipped_value_loss(x, x, x, m),
    "trust_region_tokens": lambda x, m: trust_region.trust_region_tokens(x, x, x),
    "normalised_weights": importance_sampling.normalised_weights,
    "second_moment_tokens": lambda x, m: importance_sampling.second_moment_tokens(x, m, 0.3),
    "high_entropy_tokens": token_filters.high_entropy_tokens,
    "highest_entropy_tokens": lambda x, m: token_filters.highest_entropy_tokens(x, m, 5),
    "token_covariance": lambda x, m: token_filters.token_covariance(x, x, m),
    "highest_covariance_tokens": token_filters.highest_covariance_tokens,
    "clip_covariance_tokens": lambda x, m: token_filters.clip_covariance_tokens(x, m, m),
}


@pytest.mark.parametrize("name", ATOMS)
def test_no_number_is_read_on_the_host(name):
    with FakeTensorMode() as mode:
        ATOMS[name](mode.from_tensor(torch.rand(6, 5)), mode.from_tensor(torch.rand(6, 5) > 0.3))


@pytest.mark.parametrize("read", [lambda x: int(x.sum()), lambda x: x[x > 0.5]], ids=["int", "index"])
def test_a_read_would_be_seen(read):
    with FakeTensorMode() as mode, pytest.raises(READS):
        read(mode.from_tensor(torch.rand(6, 5)))
