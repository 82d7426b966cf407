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


def test_no_prompt_is_too_long(model):
    dataset = [{"prompt": "1+" * length} for length in (1, 2, 3, 300)]
    args = GRPOConfig(output_dir="long", **SMALL)

    def length(completions, **_):
        return [float(len(text)) for text in completions]

    trainer = GRPOTrainer(model=model, reward_funcs=length, args=args, train_dataset=dataset)
    trainer.train()
    assert trainer.config.data.max_prompt_tokens == 600


@pytest.mark.parametrize("form", ["parameter", "columns", "object", "async"])
def test_a_reward_gets_the_trainers_state(form, model):
    from transformers import TrainerCallback

    seen, begun = [], []

    def see(state, completions):
        seen.append((state.global_step, state.max_steps, state.epoch, state.num_train_epochs, len(state.log_history)))
        return [float(state.global_step)] * len(completions)

    def parameter(completions, trainer_state, log_metric, **columns):
        log_metric("length", 1.0)
        return see(trainer_state, completions)

    def columns(completions, **columns):
        return see(columns["trainer_state"], completions)

    class Reward:
        def __call__(self, completions, **columns):
            return see(columns.get("trainer_state"), completions)

    async def coroutine(completions, trainer_state, **columns):
        return see(trainer_state, completions)

    class Begun(TrainerCallback):
        def on_step_begin(self, args, state, control, **others):
            begun.append(state.global_step)

    reward = {"parameter": parameter, "columns": columns, "object": Reward(), "async": coroutine}[form]
    args = GRPOConfig(output_dir="out", num_iterations=2, num_train_epochs=1, **SMALL | {"max_steps": -1})
    rows = [{"prompt": f"{n}+1="} for n in range(4)]
    trainer = GRPOTrainer(model, reward, args, rows, callbacks=[Begun()])
    state = trainer.state
    result = trainer.train()
    assert list(dict.fromkeys(seen)) == [(0, 4, 0.0, 1, 0), (2, 4, 0.5, 1, 1)]
    assert begun == [0, 2] and result.global_step == 4
    history = [(row["step"], row["epoch"], row["reward"]) for row in state.log_history]
    assert state is trainer.state and history == [(2, 0.5, 0.0), (4, 1.0, 2.0)]
    assert any("log_metric" in note for note in trainer.notes()) == (form == "parameter")


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


# ---- Quick starts: only the import and the model are others ----

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
    "ppo": """
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from atomrl.trl import PPOConfig, PPOTrainer

tokenizer.add_special_tokens({"pad_token": "[PAD]"})
critic, scores = (AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1) for _ in range(2))
dataset = [{"input_ids": tokenizer(f"{n}+1=")["input_ids"]} for n in range(8)]
args = PPOConfig(output_dir="out", total_episodes=8, response_length=4, missing_eos_penalty=2.0, **SMALL)
trainer = PPOTrainer(
    args, tokenizer, AutoModelForCausalLM.from_pretrained(MODEL), AutoModelForCausalLM.from_pretrained(MODEL),
    reward_model=scores, train_dataset=dataset, value_model=critic,
)
trainer.train()
""",
    "gkd": """
from transformers import AutoModelForCausalLM
from atomrl.trl import GKDConfig, GKDTrainer

answer = {"role": "assistant", "content": "no"}
dataset = [{"messages": [{"role": "user", "content": f"{n}+1="}, answer]} for n in range(8)]
args = GKDConfig(output_dir="out", lmbda=1.0, max_new_tokens=4, **SMALL)
teacher = AutoModelForCausalLM.from_pretrained(MODEL)
trainer = GKDTrainer(MODEL, teacher, args, train_dataset=dataset, processing_class=tokenizer)
trainer.train()
""",
    "distillation": """
from atomrl.trl import DistillationConfig, DistillationTrainer

dataset = [{"prompt": [{"role": "user", "content": f"{n}+1="}]} for n in range(8)]
args = DistillationConfig(output_dir="out", max_completion_length=4, num_generations=2, **SMALL)
trainer = DistillationTrainer(model=MODEL, teacher_model=MODEL, args=args, train_dataset=dataset)
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


def test_the_arguments_of_ppo_and_gkd_mean_what_they_mean_there():
    from atomrl.trl import GKDConfig, PPOConfig

    ppo = PPOConfig(
        per_device_train_batch_size=4, gradient_accumulation_steps=2, total_episodes=20, stop_token_id=7, kl_coef=0.1,
        kl_estimator="k3", cliprange=0.3, vf_coef=0.5, lam=0.9, response_length=9, max_grad_norm=0.1,
    ).to_tree()  # fmt: skip
    assert ppo["rollout"] | {"engine": 0} == {
        "engine": 0, "prompts_per_step": 8, "completions_per_prompt": 1, "max_completion_tokens": 9, "temperature": 0.7,
        "stop_token_ids": [7],
    }  # fmt: skip
    train, algorithm = ppo["train"], ppo["algorithm"]
    assert (train["steps"], train["rows_per_update"], train["epochs_per_step"], train["max_grad_norm"]) == (
        3,
        8,
        4,
        1e30,
    )
    assert algorithm["kl"] == {"type": "k3", "coefficient": 0.1, "apply_to": "reward", "target": None}
    assert (algorithm["clip"]["high"], algorithm["value"]["coefficient"], algorithm["advantage"]["lam"]) == (
        0.3,
        0.5,
        0.9,
    )
    assert ppo["critic"]["learning_rate"] == 3e-6
    gkd = GKDConfig(lmbda=1.0, beta=0.2, max_new_tokens=24, per_device_train_batch_size=2).to_tree()
    assert (gkd["algorithm"]["distillation"]["beta"], gkd["rollout"]["prompts_per_step"]) == (0.2, 2)
    assert (gkd["rollout"]["temperature"], gkd["data"]["max_prompt_tokens"]) == (0.9, 1000)


def test_the_gradient_of_the_kl_is_that_of_trl():
    assert config_of(beta=0.1).algorithm.kl.k2_gradient  # use_bias_correction_kl is on in TRL
    assert not config_of(beta=0.1, use_bias_correction_kl=False).algorithm.kl.k2_gradient
    said = "use_bias_correction_kl"
    assert not any(said in note for note in GRPOConfig(beta=0.1).notes())
    assert any(said in note for note in GRPOConfig(beta=0.1, num_iterations=2).notes())


def test_four_bits_that_are_not_nf4_are_announced(model):
    from transformers import BitsAndBytesConfig

    def notes(**settings):
        loading = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, **settings)}
        args = GRPOConfig(output_dir="out", model_init_kwargs=loading)
        rows, adapters = [{"prompt": "1+1="}], {"r": 2}
        trainer = GRPOTrainer(model, reward_funcs="strict_format", args=args, train_dataset=rows, peft_config=adapters)
        return "\n".join(trainer.notes())

    assert "bnb_4bit_quant_type: TRL fp4; here nf4" in notes()  # transformers' default
    assert "bnb_4bit_quant_type" not in notes(bnb_4bit_quant_type="nf4")


def test_adapters_without_named_layers_are_on_those_that_peft_chooses(model):
    from peft import LoraConfig

    from atomrl.trl import SFTConfig, SFTTrainer
    from atomrl.trl.adapters import default_targets

    args = SFTConfig("out", max_steps=1, per_device_train_batch_size=2, use_cpu=True)
    trainer = SFTTrainer(model, args=args, train_dataset=[{"text": "1+1=2"}] * 2, peft_config=LoraConfig(r=2))
    trainer.train()
    assert set(trainer.config.model.lora.target_modules) == {"q_proj", "v_proj"}
    with pytest.raises(ConfigError, match="no default of target_modules for a qwen3_vl model"):
        default_targets("qwen3_vl")


@pytest.mark.parametrize("frozen", ["model.embed_tokens", "model.layers.0"])
def test_frozen_weights_are_refused(model, frozen):
    from transformers import AutoModelForCausalLM

    from atomrl.trl import SFTTrainer

    given = AutoModelForCausalLM.from_pretrained(model)
    for name, weight in given.named_parameters():
        weight.requires_grad_(not name.startswith(frozen))
    with pytest.raises(ConfigError, match="frozen"):
        SFTTrainer(given, train_dataset=[{"text": "a"}])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"teacher_model_init_kwargs": {"load_in_4bit": True}}, "a teacher is loaded unquantised"),
        ({"teacher_model_init_kwargs": '{"revision": "v2"}'}, "in its newest revision"),
        ({"train_dataset": [{"messages": []}, {"text": "a"}]}, r"train_dataset\[1\]: a row needs messages or a prompt"),
        ({"eval_dataset": [{"text": "a"}]}, r"eval_dataset\[0\]: a row needs messages"),
    ],
)
def test_inputs_of_a_distillation_that_are_refused(given, message, model):
    from atomrl.trl import DistillationConfig, DistillationTrainer

    given = {"train_dataset": [{"prompt": "1+1="}], "teacher_model": model} | given
    loading = {name: given.pop(name) for name in ["teacher_model_init_kwargs"] if name in given}
    with pytest.raises(ConfigError, match=message):
        DistillationTrainer(model, args=DistillationConfig(**loading), **given)


def test_each_reward_model_has_its_tokenizer_or_none(model):
    with pytest.raises(ConfigError, match="a tokenizer for each of the 1 reward_funcs"):
        GRPOTrainer(
            model, reward_funcs="strict_math", args=GRPOConfig(), train_dataset=[{"prompt": "a"}],
            reward_processing_classes=[None, None],
        )  # fmt: skip


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


def test_a_reference_has_the_weights_of_the_model(model):
    from transformers import AutoModelForCausalLM

    from atomrl.trl import DPOTrainer, create_reference_model

    loaded = AutoModelForCausalLM.from_pretrained(model)
    given = {
        "ref_model": create_reference_model(loaded),
        "train_dataset": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
    }
    DPOTrainer(loaded, **given)
    loaded.lm_head.weight.data += 1  # as after another training
    with pytest.raises(ConfigError, match="ref_model: the reference is always the initial model"):
        DPOTrainer(loaded, **given)
