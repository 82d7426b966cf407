"""Distances of a student from its teacher."""

from __future__ import annotations

import math

from atomrl.atoms import auxiliary_losses as distillation
from atomrl.atoms import kl, masks
from atomrl.atoms import policy_losses as reductions
from tests.parity.arranging import SMALL, Values, every


def trl_jsd(inputs: Values, params: Values) -> Values:
    student = inputs["student_logits"]
    distance = distillation.generalised_jsd(
        student, inputs["teacher_logits"], float(params["beta"]), float(params["temperature"])
    )
    labelled = inputs.get("labels") is not None
    kept = inputs["labels"] != -100 if labelled else every(distance)
    count = max(int(kept.sum()), 1)
    if params.get("num_items_in_batch") is not None:
        total = float(params["num_items_in_batch"])
    elif params["reduction"] == "sum":
        total = 1.0
    elif params["reduction"] == "mean":
        total = float(count * student.shape[-1])
    else:
        total = float(count if labelled else len(student))
    weights = reductions.token_mean(kept, total_tokens=total)
    return {"loss": reductions.weighted_sum(distance, weights)}


def verl_topk(inputs: Values, params: Values) -> Values:
    ids, teacher = inputs["teacher_topk_ids"], inputs["teacher_topk_log_probs"]
    student = inputs["student_logits"].log_softmax(-1).gather(-1, ids)
    floor = params.get("log_prob_min_clamp")
    floor = -math.inf if floor is None else float(floor)
    bounded = teacher.clamp(min=floor), student.clamp(min=floor)
    own = inputs["student_logits"].topk(ids.shape[-1], dim=-1).indices
    overlap = (ids[..., :, None] == own[..., None, :]).any(-1)
    loss = kl.distribution_kl(*bounded)
    return {
        "loss": loss,
        "student_mass": student.exp().sum(-1),
        "teacher_mass": teacher.exp().sum(-1),
        "overlap_count": overlap.sum(-1),
        "overlap_token_advantage": -masks.row_mean(bounded[0].exp() * (bounded[0] - bounded[1]), overlap),
        "objective": {"sum": masks.masked_sum(loss, every(loss))},
    }


def nemo_topk(inputs: Values, params: Values) -> Values:
    student, teacher, kind = inputs["student_topk_log_probs"], inputs["teacher_topk_log_probs"], params["kl_type"]
    forward_weight = {"forward": 1.0, "reverse": 0.0, "mixed": float(params["mixed_kl_weight"])}[kind]
    forward, reverse = kl.distribution_kl(teacher, student), kl.distribution_kl(student, teacher)
    distance = forward_weight * forward + (1 - forward_weight) * reverse
    weights = reductions.token_mean(inputs["mask"], total_tokens=float(inputs["mask"].sum()) + SMALL)
    loss = reductions.weighted_sum(distance, weights)
    if params["zero_outside_topk"] and kind != "forward":
        # The rest of the reverse KL, where the teacher is taken to give nothing.
        inside, floor = student.exp(), float(params.get("log_infinitesimal", -100.0))
        rest = inputs["student_sum_p_logp"] - (inside * student).sum(-1) - floor * (1 - inside.sum(-1))
        loss = loss + reductions.weighted_sum(rest, weights, scale=1 - forward_weight)
    return {"loss": loss}


ADAPTERS = {
    "distillation.generalized_jsd.trl": trl_jsd,
    "distillation.forward_kl_topk.verl": verl_topk,
    "distillation.topk_kl.nemo_rl": nemo_topk,
}
