"""Rewards in a module that imports nothing slow: a worker that calls one would import its test's PyTorch too."""

import time


def letter_reward(prompts, completions, seconds=0.0, **columns):
    """Return the share of letters up to m, which a random model earns by degrees, after `seconds`."""
    time.sleep(seconds)
    return [sum(c in "abcdefghijklm" for c in text) / max(1, len(text)) for text in completions]


def digit_reward(prompts, completions, **columns):
    """Return the share of digits."""
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in completions]


def odd_length(prompts, completions, **columns):
    return [float(len(text) % 2) for text in completions]


def code_points(prompts, completions, **columns):
    """Return numbers from 0 to 6 that differ within a group."""
    return [sum(map(ord, text)) % 7 for text in completions]


def nothing_for_products(prompts, completions, data_source, **columns):
    return [None if source == "products" else 1.0 for source in data_source]


def nothing_for_wrong_answers(prompts, completions, ground_truth, **columns):
    return [1.0 if truth in text else None for text, truth in zip(completions, ground_truth, strict=True)]


def even_truths(prompts, completions, ground_truth, **columns):
    """Return 1 for every completion of a prompt whose ground truth is even, else 0."""
    return [float(int(truth) % 2 == 0) for truth in ground_truth]
