"""Scripts as TRL's documentation has them, with the import changed, on a tiny model."""

import pytest

from atomrl.config import ConfigError, load_config, merge_trees
from atomrl.trl import GRPOConfig, GRPOTrainer
from tests.tiny import make_tiny_model

SMALL = {
    "max_completion_length": 4,
    "num_generations": 2,
    "per_device_train_batch_size": 4,
    "max_steps": 2,
    "use_cpu": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config_of(**arguments):
    tree = GRPOConfig(**arguments).to_tree()
    return load_config(merge_trees(tree, {"run_name": "r", "model": {"path": "m"}, "data": {"train": "d"}}))


def test_the_quick_start(model):
    dataset = [{"prompt": f"Summarise {n}."} for n in range(8)]

    def reward_len(completions, **kwargs):
        return [-abs(20 - len(completion)) for completion in completions]

    training_args = GRPOConfig(output_dir="Qwen2-0.5B-GRPO", logging_steps=10, report_to="none", **SMALL)
    trainer = GRPOTrainer(model=model, reward_funcs=reward_len, args=training_args, train_dataset=dataset)
    trainer.train()
    history = trainer.state.log_history
    assert trainer.state.global_step == 2 and [row["step"] for row in history] == [1, 2]
    for name in ("loss", "reward", "grad_norm", "learning_rate", "completions/mean_length", "rewards/reward_len/mean"):
        assert isinstance(history[0][name], float), name
    trainer.save_model(training_args.output_dir)
    assert (trainer.run_dir / "model.safetensors").is_file() and str(trainer.run_dir) == "Qwen2-0.5B-GRPO"


def test_a_conversational_data_set_gives_rewards_messages(model):
    seen = []

    def accuracy_reward(completions, solution, **kwargs):
        contents = [completion[0]["content"] for completion in completions]
        seen.extend(contents)
        return [float(s in content) for content, s in zip(contents, solution, strict=True)]

    def brevity(prompts, completions, **kwargs):
        return [-float(len(completion[0]["content"])) for completion in completions]

    rows = [{"prompt": [{"role": "user", "content": f"{n}+1="}], "solution": str(n + 1)} for n in range(4)]
    args = GRPOConfig(output_dir="out", reward_weights=[1.0, 0.1], beta=0.04, bf16=False, **SMALL)
    from transformers import AutoTokenizer

    trainer = GRPOTrainer(
        model, reward_funcs=[accuracy_reward, brevity], args=args, train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(model),
    )  # fmt: skip
    trainer.train()
    assert seen and all(isinstance(text, str) for text in seen)
    assert trainer.config.algorithm.kl.coefficient == 0.04 and trainer.config.reward.functions[1].weight == 0.1


def test_arguments_mean_what_they_mean_there():
    config = config_of(
        learning_rate=2e-5, num_generations=4, per_device_train_batch_size=8, gradient_accumulation_steps=2,
        epsilon=0.1, epsilon_high=0.28, beta=0.01, loss_type="dr_grpo", scale_rewards=False, max_steps=5,
        warmup_ratio=0.1,
        max_completion_length=99, save_steps=50, temperature=0.7, lr_scheduler_type="cosine", seed=3, num_iterations=2,
    )  # fmt: skip
    rollout, train, algorithm = config.rollout, config.train, config.algorithm
    assert (rollout.completions_per_prompt, rollout.prompts_per_step, rollout.max_completion_tokens) == (4, 4, 99)
    assert (train.rows_per_update, train.epochs_per_step, train.learning_rate) == (16, 2, 2e-5)
    assert (train.schedule, train.warmup_ratio, config.seed, rollout.temperature) == ("cosine", 0.1, 3, 0.7)
    assert (algorithm.clip.low, algorithm.clip.high, algorithm.kl.coefficient) == (0.1, 0.28, 0.01)
    assert algorithm.loss_agg.type == "constant_length" and algorithm.advantage.type == "grpo_no_std"


def test_defaults_are_those_of_trl():
    config, args = config_of(), GRPOConfig()
    assert (args.learning_rate, args.beta, args.num_generations, args.num_train_epochs) == (1e-6, 0.0, 8, 3.0)
    assert config.train.schedule == "linear" and config.train.total_epochs == 3.0 and config.seed == 42
    assert args.epsilon_high is None and config.model.dtype == "auto"


@pytest.mark.parametrize(
    ("argument", "value", "said"),
    [("learning_rat", 1e-5, "did you mean 'learning_rate'"), ("use_liger_loss_", True, "no argument"),
     ("loss_type", "luspo", "loss_type"), ("sync_ref_model", True, "sync_ref_model"), ("beta", "high", "beta"),
     ("processing_class", 1, "argument of the trainer")],
)  # fmt: skip
def test_trl_options_without_a_meaning_are_refused_by_name(argument, value, said):
    with pytest.raises(ConfigError, match=said):
        GRPOConfig(**{argument: value})
    args = GRPOConfig()
    with pytest.raises(ConfigError, match=said):
        setattr(args, argument, value)
    assert args.to_tree() == GRPOConfig().to_tree()


def test_trls_own_config_is_answered_with_the_import(model):
    other = type("GRPOConfig", (), {"__module__": "trl.trainer.grpo_config"})()
    with pytest.raises(ConfigError, match=r"atomrl\.trl"):
        GRPOTrainer(model, reward_funcs="strict_math", args=other)


# ---- The five quick starts: only the import and the model are others ----

QUICK = {
    "sft": """
from atomrl.trl import SFTConfig, SFTTrainer

dataset = [
    {"messages": [{"role": "user", "content": f"What is {n} + 1?"}, {"role": "assistant", "content": str(n + 1)}]}
    for n in range(8)
]
trainer = SFTTrainer(MODEL, args=SFTConfig(output_dir="out", **SMALL), train_dataset=dataset, eval_dataset=dataset[:2])
trainer.train()
""",
    "dpo": """
from atomrl.trl import DPOConfig, DPOTrainer

dataset = [
    {"chosen": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": str(n)}],
     "rejected": [{"role": "user", "content": f"Say {n}"}, {"role": "assistant", "content": "no"}]}
    for n in range(8)
]
training_args = DPOConfig(output_dir="out", beta=0.1, logging_steps=10, **SMALL)
trainer = DPOTrainer(model=MODEL, args=training_args, processing_class=tokenizer, train_dataset=dataset)
trainer.train()
""",
    "reward": """
from atomrl.trl import RewardConfig, RewardTrainer

dataset = [{"prompt": f"Say {n}", "chosen": str(n), "rejected": "no"} for n in range(8)]
trainer = RewardTrainer(model=MODEL, args=RewardConfig(output_dir="out", **SMALL), train_dataset=dataset)
trainer.train()
""",
    "rloo": """
from atomrl.trl import RLOOConfig, RLOOTrainer


def reward_num_unique_letters(completions, **kwargs):
    completion_contents = [completion[0]["content"] for completion in completions]
    return [float(len(set(content))) for content in completion_contents]


dataset = [{"prompt": [{"role": "user", "content": f"Write {n} letters"}]} for n in range(8)]
training_args = RLOOConfig(output_dir="out", max_completion_length=4, num_generations=2, **SMALL)
trainer = RLOOTrainer(
    model=MODEL, reward_funcs=reward_num_unique_letters, args=training_args, train_dataset=dataset
)
trainer.train()
""",
    "grpo": """
from atomrl.trl import GRPOConfig, GRPOTrainer


def reward_by_tokens(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


dataset = [{"prompt": [{"role": "user", "content": f"Write {n} letters"}]} for n in range(8)]
training_args = GRPOConfig(output_dir="out", max_completion_length=4, num_generations=2, **SMALL)
trainer = GRPOTrainer(model=MODEL, reward_funcs=reward_by_tokens, args=training_args, train_dataset=dataset)
trainer.train()
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", QUICK)
def test_the_quick_start_of_each_trainer(kind, model):
    from transformers import AutoTokenizer

    small = {"per_device_train_batch_size": 4, "max_steps": 2, "use_cpu": True, "report_to": "none"}
    names = {"MODEL": model, "SMALL": small, "tokenizer": AutoTokenizer.from_pretrained(model)}
    exec(QUICK[kind], names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 2 and trainer.config.train.steps == 2
    assert trainer.config.kind == {"reward": "reward-model", "sft": "sft", "dpo": "preference"}.get(kind, "rl")
    trainer.save_model("saved")
    assert (trainer.run_dir / "model").is_dir() and (trainer.run_dir.parent / "saved/model.safetensors").is_file()
    with pytest.raises(ConfigError, match="resume_from_checkpoint=True"):
        trainer.train()


def test_a_trainer_takes_its_own_config_and_needs_rows(model):
    from atomrl.trl import DPOConfig, DPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig, SFTTrainer

    with pytest.raises(ConfigError, match="SFTConfig, not DPOConfig"):
        SFTTrainer(model, args=DPOConfig())
    with pytest.raises(ConfigError, match="RLOOConfig"):
        RLOOTrainer(model, reward_funcs="strict_math", args=GRPOConfig())
    with pytest.raises(ConfigError, match="train_dataset: is required"):
        SFTTrainer(model)
    with pytest.raises(ConfigError, match="'learning_rat'"):
        SFTConfig(learning_rat=1e-5)
    with pytest.raises(ConfigError, match="ref_model"):
        DPOTrainer(model, ref_model="another", train_dataset=[{"prompt": "a", "chosen": "b", "rejected": "c"}])
    assert RLOOConfig().to_tree()["algorithm"]["name"] == "rloo"
