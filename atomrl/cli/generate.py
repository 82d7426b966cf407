"""Complete a prompt with a model.

atomrl generate runs/quickstart/model --prompt "2 + 2 * 3 = ?"
echo "2 + 2 * 3 = ?" | atomrl generate MODEL --prompt - --n 4 --temperature 0.7
"""

import argparse
import sys

from atomrl.cli.sampling import NO_LIMIT, add_option, add_sampling_arguments, config_over, within_context


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sampling_arguments(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="- reads it from standard input")
    add_option(parser, "--n", "eval.samples_per_prompt", "N", "completions to draw (default 1)")
    parser.add_argument("--ids", action="store_true", help="print the tokens' ids and log-probs as well")


def run(arguments: argparse.Namespace) -> int:
    text = read_prompt(arguments.prompt)
    if not text:
        raise ValueError("--prompt: the prompt is empty")
    from atomrl.data.processor import DataProcessor
    from atomrl.rollout.generate import generate
    from atomrl.runs.build import build_rollout, eval_sampling, model_path, policy_tokenizer
    from atomrl.types import Sample

    config = config_over({"run_name": "generate", "data": {"train": "-", "max_prompt_tokens": NO_LIMIT}}, arguments)
    tokenizer = policy_tokenizer(config)
    sample = Sample(sample_id="prompt", prompt=text, ground_truth=None)
    (prompt,) = DataProcessor(tokenizer, config.data).to_prompts([("prompt", sample)])
    config = within_context(config, len(prompt.token_ids))
    engine = build_rollout(config, model_path(config), tokenizer, None)
    completions = generate(engine, [prompt], eval_sampling(config))
    engine.close()
    for number, completion in enumerate(completions, start=1):
        if len(completions) > 1:
            print(
                f"--- {number} of {len(completions)}, {completion.response_tokens} tokens, {completion.finish_reason}"
            )
        print(completion.text)
        if arguments.ids:
            drawn = [segment for segment in completion.segments if segment.origin == "model"]
            print([token for segment in drawn for token in segment.token_ids])
            print([round(logprob, 4) for segment in drawn for logprob in segment.logprobs or ()])
    return 0


def read_prompt(given: str) -> str:
    """The prompt itself, or standard input for `-`.

    Raises:
        ValueError: it is no UTF-8.
    """
    try:
        text = sys.stdin.read() if given == "-" else given
        text.encode("utf-8")  # an argument that is no UTF-8 comes in as lone surrogates
    except UnicodeError:
        raise ValueError("--prompt: the prompt is not valid UTF-8") from None
    return text
