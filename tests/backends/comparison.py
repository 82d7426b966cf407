"""Compare the results of several ranks with those of one process."""

import pytest
import torch

RELATIVE = 1e-5


def without_ties(metrics):
    """Without the share of pairs that are told apart where that is a matter of rounding: before the first update."""
    ties = abs(metrics.get("rewards/margins", 1.0)) < RELATIVE
    return {name: number for name, number in metrics.items() if not (ties and name == "rewards/accuracies")}


def compare(ranks, expected, relative=RELATIVE):
    first = ranks[0]
    assert all(rank["metrics"] == first["metrics"] for rank in ranks), "all ranks say the same"
    for mine, theirs in zip(first["metrics"], expected["metrics"], strict=True):
        assert without_ties(mine) == pytest.approx(without_ties(theirs), rel=relative, abs=RELATIVE, nan_ok=True)
    for mine, theirs in zip(first["outputs"], expected["outputs"], strict=True):
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name], tensor, atol=1e-5, rtol=1e-5)
    assert first["weights"].keys() == expected["weights"].keys()
    for name, tensor in expected["weights"].items():
        assert (tensor - first["weights"][name]).abs().max() <= RELATIVE * tensor.abs().max(), name
