"""TRL's interface: scripts of TRL run with `from trl import` changed to `from atomrl.trl import`, or unchanged with
`atomrl run`. And GRPO in five functions.

    from atomrl.trl import GRPOConfig, GRPOTrainer

    trainer = GRPOTrainer(model="your-model-path", reward_funcs=my_reward, args=GRPOConfig(output_dir="out"),
                          train_dataset=dataset)
    trainer.train()

Trainers with their configs: SFT, GRPO, RLOO, DPO, KTO, ORPO, CPO, OnlineDPO, PPO, GKD, Distillation and Reward.
`GRPOArgs` are GRPO's arguments with AtomRL's names. `docs/start/migrating.md` has what differs,
`docs/reference/python_api.md` the arguments, the files of a run, and the whole algorithm written with the five
functions.
"""

import importlib.util
import re
from typing import Any

from atomrl.redirect import absent
from atomrl.trl.arguments import GRPOArgs
from atomrl.trl.callbacks import LogCompletionsCallback, RichProgressCallback
from atomrl.trl.collators import DataCollatorForCompletionOnlyLM
from atomrl.trl.configs import (
    VERSION,
    CPOConfig,
    DistillationConfig,
    DPOConfig,
    GKDConfig,
    GRPOConfig,
    KTOConfig,
    OnlineDPOConfig,
    ORPOConfig,
    PPOConfig,
    RewardConfig,
    RLOOConfig,
    SFTConfig,
)
from atomrl.trl.functions import (
    compute_advantages,
    compute_kl_penalty,
    compute_policy_loss,
    generate_samples,
    get_action_log_probs,
)
from atomrl.trl.offline import CPOTrainer, DPOTrainer, KTOTrainer, ORPOTrainer, RewardTrainer, SFTTrainer
from atomrl.trl.online import (
    DistillationTrainer,
    GKDTrainer,
    GRPOTrainer,
    OnlineDPOTrainer,
    PPOTrainer,
    RLOOTrainer,
)
from atomrl.trl.scripts import (
    SIMPLE_CHAT_TEMPLATE,
    DatasetConfig,
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    TrlParser,
    accuracy_reward,
    apply_chat_template,
    create_reference_model,
    extract_prompt,
    get_dataset,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    init_zero_verbose,
    is_conversational,
    maybe_apply_chat_template,
    maybe_extract_prompt,
    maybe_unpair_preference_dataset,
    reasoning_accuracy_reward,
    setup_chat_format,
    think_format_reward,
    unpair_preference_dataset,
)

__version__ = f"{VERSION}.0"
STEPS = (
    "nothing for a loop of ppo_trainer.step (TRL before 0.12): GRPOTrainer(reward_funcs=FUNCTION) samples and trains "
    "by itself; PPOTrainer, with a critic, does so from reward_model and value_model"
)
INSTEAD = {
    "AutoModelForCausalLMWithValueHead": STEPS,
    "AutoModelForSeq2SeqLMWithValueHead": STEPS,
    "LengthSampler": STEPS,
    "respond_to_batch": STEPS,
    "PPODecorators": STEPS,
    "BCO": "BCO: KTOTrainer with loss_type='bco'",
    "AsyncGRPO": "GRPO in a separate process: a config with the section `asynchronous`",
    "ConstantLengthDataset": "SFTTrainer with packing=True",
}
"""Beginning of a name of TRL without a counterpart -> what AtomRL has in its place."""


def __getattr__(name: str) -> Any:
    if package := re.fullmatch("is_(.+)_available", name):  # of trl.import_utils
        return lambda: importlib.util.find_spec(package[1]) is not None
    known = [each for each in INSTEAD if name.startswith(each)]
    there = f"; AtomRL has {INSTEAD[known[0]]}" if known else ""
    trainers = ", ".join(sorted(each for each in globals() if each.endswith("Trainer")))
    raise absent("TRL", name, f"{there}. Trainers: {trainers}")


PPOv2Config, PPOv2Trainer = PPOConfig, PPOTrainer  # their names in TRL 0.9 to 0.11
