"""Complete a prompt with a model.

atomrl generate runs/quickstart/checkpoints/step_000100 --prompt "2 + 2 * 3 = ?"
echo "2 + 2 * 3 = ?" | atomrl generate MODEL --prompt - --n 4 --temperature 0.7
"""

from __future__ import annotations

import argparse
import sys

from atomrl.cli.sampling import KEYS, add_sampling_arguments, config_over, open_engine, within_context


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sampling_arguments(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="- reads it from standard input")
    parser.add_argument("--n", type=int, default=1, help="completions to draw (default 1)")
    parser.add_argument("--ids", action="store_true", help="print the tokens' ids and log-probs as well")


def run(arguments: argparse.Namespace) -> int:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    if not text:
        raise ValueError("--prompt: the prompt is empty")
    base = {"run_name": "generate", "data": {"train": "-", "max_prompt_tokens": 1_000_000}}
    config = config_over(base, vars(arguments), KEYS, "atomrl generate")
    from atomrl.assembly import eval_sampling
    from atomrl.data.processor import DataProcessor
    from atomrl.models.loading import load_tokenizer
    from atomrl.stages import Sample

    tokenizer = load_tokenizer(arguments.model)
    sample = Sample(sample_id="prompt", prompt=text, ground_truth=None)
    batch = DataProcessor(tokenizer, config.data).to_prompt_batch([("prompt", sample)])
    config = within_context(config, len(batch.prompt_token_ids[0]))
    engine = open_engine(config, tokenizer)
    (completions,) = engine.generate(batch, eval_sampling(config)).completions
    engine.close()
    for number, completion in enumerate(completions, start=1):
        if len(completions) > 1:
            print(f"--- {number} of {len(completions)}, {len(completion.token_ids)} tokens, {completion.finish_reason}")
        print(completion.text)
        if arguments.ids:
            print(list(completion.token_ids))
            print([round(logprob, 4) for logprob in completion.logprobs or ()])
    return 0
