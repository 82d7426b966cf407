"""One whole GRPO step (rollout, reward, advantages, update) of AtomRL beside TRL, turn by turn in one run.

    python benchmarks/step_vs_trl.py [--dtype bfloat16|float32] [--steps 4] [--compile] [--out FILE.json]

The same random Qwen2 model of 3.0 million parameters for both (`rollout.make_model`), 16 prompts of 40 tokens x 8
completions, temperature 1, one AdamW step on all 128 rows, no KL term, no reference, the same reward. `fixed`: 128
tokens each. `ragged`: the model itself ends each completion with probability 1/63 per token after the 16th (at most
256), so neither scheduler is told the lengths and both draw them from one distribution; a step's time is also given per
token drawn.

TRL 1.16 generates with Hugging Face generate and takes the batch in one piece (`--trl-rows` for less), which is its
fastest setting here. With `bfloat16` its weights and its AdamW are bfloat16; ours keep float32 masters. AtomRL takes
its turn in TRL's `on_step_end`. The first steps of both, with all compilation, are printed apart and not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import tempfile
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rollout import EOS, FIXED_TOKENS, MAX_TOKENS, MEMBERS, MIN_TOKENS, PROMPT_TOKENS, PROMPTS, SHAPES, make_model

from atomrl.models.tokenizer import make_tokenizer

TARGETS = {"fixed": 1.7, "ragged": 2.5}


def reward(prompts: list[Any], completions: list[str], **columns: Any) -> list[float]:
    """Something cheap that differs within a group."""
    return [float(len(set(text)) % 7) for text in completions]


def prompt_texts(turn: int) -> list[str]:
    """16 prompts of 40 characters, which are 40 tokens."""
    rng = random.Random(turn)
    return ["".join(rng.choices(string.ascii_lowercase, k=PROMPT_TOKENS)) for _ in range(PROMPTS)]


def save_tokenizer(folder: Path) -> None:
    """A token for each byte; the end-of-sequence token is the model's."""
    tokenizer = make_tokenizer()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(EOS)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)


def make_atomrl_step(folder: Path, workload: str, arguments: argparse.Namespace):
    """A function that runs step n of AtomRL's loop and returns (seconds, tokens drawn, seconds by phase)."""
    from atomrl.algorithms import objective_of
    from atomrl.backends.local import LocalBackend
    from atomrl.config import load_config
    from atomrl.data.curriculum import Curriculum
    from atomrl.data.processor import DataProcessor
    from atomrl.data.prompt_stream import PromptStream
    from atomrl.models.loading import load_tokenizer
    from atomrl.rewards.compute import build_rewards
    from atomrl.trainer.build import build_engine, device_name
    from atomrl.trainer.loop import Progress, fit
    from atomrl.trainer.rollout_training import RolloutTraining
    from atomrl.trainer.sources import EngineSource
    from atomrl.types import Problem, SamplingParams
    from atomrl.weight_sync import InProcessTransfer

    lengths = {"max_completion_tokens": FIXED_TOKENS if workload == "fixed" else MAX_TOKENS}
    config = load_config(
        {
            "run_name": "benchmark",
            "model": {"path": str(folder), "dtype": arguments.dtype, "compile": arguments.compile},
            "data": {"train": "none.jsonl"},
            "rollout": {"prompts_per_step": PROMPTS, "completions_per_prompt": MEMBERS, **lengths},
            "reward": {"functions": [{"function": "step_vs_trl.reward"}]},
            "train": {"learning_rate": 1e-6, "report_entropy": True, "tokens_per_micro_batch": arguments.tokens},
            "tracking": {"tokens": 0},
        }
    )
    tokenizer = load_tokenizer(str(folder))
    samples = [
        Problem(problem_id=f"{turn}/{index}", prompt=text, ground_truth="")
        for turn in range(arguments.steps + 2)
        for index, text in enumerate(prompt_texts(turn))
    ]
    algorithm = objective_of({"name": "grpo"}).resolved(report_entropy=True)
    sampling = {"min_completion_tokens": MIN_TOKENS} if workload == "ragged" else {"ignore_eos": True}
    engine = build_engine(config, str(folder), tokenizer)
    trainer = LocalBackend(
        config.model,
        config.train,
        algorithm,
        total_updates=config.train.steps,
        tokenizer=tokenizer,
        device=device_name(),
    )
    processor = DataProcessor(tokenizer, config.data)
    source = EngineSource(
        engine=engine,
        algorithm=algorithm,
        curriculum=Curriculum(PromptStream(samples, shuffle=False)),
        processor=processor,
        rewards=build_rewards(config.reward),
        sampling=SamplingParams(completions_per_prompt=MEMBERS, **lengths, **sampling),
    )
    metrics: list[dict[str, float]] = []
    record = SimpleNamespace(
        log=lambda step, row: metrics.append(row), log_rollouts=lambda *_: None, checkpoint=lambda step: nullcontext()
    )
    training = RolloutTraining(
        source=source,
        transfer=InProcessTransfer(trainer, engine),
        trainer=trainer,
        algorithm=algorithm,
        processor=processor,
        record=record,
        config=config,
        progress=Progress(),
    )
    training.transfer(0)

    def step(number: int) -> tuple[float, float, dict[str, float]]:
        train = config.train.model_copy(update={"steps": number})
        started = time.perf_counter()
        fit(training, config.model_copy(update={"train": train}), training.progress, lambda folder, now: None)
        seconds = time.perf_counter() - started
        tokens = metrics[-1]["response_length/mean"] * PROMPTS * MEMBERS
        return seconds, tokens, {key: value for key, value in metrics[-1].items() if key.startswith("timing_s/")}

    return step


def run_workload(workload: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """TRL's trainer, with a step of AtomRL after each of its own."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    folder = make_model(Path(tempfile.mkdtemp()), ragged=workload == "ragged", size=arguments.size)
    save_tokenizer(folder)
    our_step = make_atomrl_step(folder, workload, arguments)
    ours: list[tuple] = []
    theirs: list[tuple] = []
    drawn: list[int] = []

    def counted_reward(prompts, completions, completion_ids, **columns):
        drawn.append(sum(len(ids) for ids in completion_ids))
        return reward(prompts, completions)

    class TakeTurns(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.started = time.perf_counter()

        def on_step_end(self, args, state, control, **kwargs):
            seconds = time.perf_counter() - self.started
            theirs.append((seconds, sum(drawn)))
            drawn.clear()
            ours.append(our_step(state.global_step))
            print(
                f"{workload} step {state.global_step}: TRL {seconds:.2f} s, {theirs[-1][1]} tokens; AtomRL "
                f"{ours[-1][0]:.2f} s, {ours[-1][1]:.0f} tokens, "
                + ", ".join(f"{key[9:]} {value:.2f}" for key, value in ours[-1][2].items()),
                flush=True,
            )

    limit = FIXED_TOKENS if workload == "fixed" else MAX_TOKENS
    settings = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        model_init_kwargs={"dtype": arguments.dtype},
        per_device_train_batch_size=arguments.trl_rows,
        gradient_accumulation_steps=PROMPTS * MEMBERS // arguments.trl_rows,
        num_generations=MEMBERS,
        max_completion_length=limit,
        generation_kwargs={"min_new_tokens": FIXED_TOKENS if workload == "fixed" else MIN_TOKENS},
        gradient_checkpointing=False,
        learning_rate=1e-6,
        beta=0.0,
        max_steps=arguments.steps + 1,
        shuffle_dataset=False,
        logging_steps=10_000,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    from transformers import AutoTokenizer

    texts = [text for turn in range(arguments.steps + 2) for text in prompt_texts(turn)]
    trainer = GRPOTrainer(
        model=str(folder),
        reward_funcs=counted_reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=AutoTokenizer.from_pretrained(folder),
        callbacks=[TakeTurns()],
    )
    trainer.train()
    return summarise(workload, theirs, ours)


def summarise(workload: str, theirs: list[tuple], ours: list[tuple]) -> dict[str, Any]:
    """Medians without the first step, and their ratios."""
    trl, atom = (statistics.median(row[0] for row in rows[1:]) for rows in (theirs, ours))
    trl_rate, atom_rate = (statistics.median(row[1] / row[0] for row in rows[1:]) for rows in (theirs, ours))
    return {
        "workload": workload,
        "trl_s": trl,
        "atomrl_s": atom,
        "ratio": trl / atom,
        "trl_tokens_per_s": trl_rate,
        "atomrl_tokens_per_s": atom_rate,
        "ratio_per_token": atom_rate / trl_rate,
        "target": TARGETS[workload],
        "first_step_trl_s": theirs[0][0],
        "first_step_atomrl_s": ours[0][0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--size", choices=list(SHAPES), default="3M")
    parser.add_argument("--steps", type=int, default=4, help="counted steps of each; one more warms up")
    parser.add_argument("--workloads", default="fixed,ragged")
    parser.add_argument("--compile", action="store_true", help="compile AtomRL's training layers")
    parser.add_argument("--tokens", type=int, default=8192, help="AtomRL's tokens_per_micro_batch")
    parser.add_argument("--trl-rows", type=int, default=PROMPTS * MEMBERS, help="TRL's per_device_train_batch_size")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(arguments.threads)
    results = [run_workload(workload, arguments) for workload in arguments.workloads.split(",")]
    for row in results:
        print(
            f"{row['workload']}: TRL {row['trl_s']:.2f} s, AtomRL {row['atomrl_s']:.2f} s a step: "
            f"{row['ratio']:.2f} times as fast ({row['ratio_per_token']:.2f} by tokens; bar {row['target']})"
        )
    if arguments.out:
        arguments.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
