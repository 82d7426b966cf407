"""The page of models lists every model type of the installed transformers, and says what happens to it."""

import re

import pytest
import transformers

from tests.models.families import PAGE, TYPES, row

TEXT = PAGE.read_text(encoding="utf-8")
LINES = {line.split("|")[1].strip(): line for line in TEXT.splitlines() if line.count("|") == 4}
VERSION = re.search(r"transformers (\S+);", TEXT)[1]
QUICK = {
    "gemma3_text", "qwen3_5_text", "qwen3_5", "llama4", "cohere", "doge", "mamba", "bert", "gemma2", "paligemma",
    "idefics", "florence2",
}  # fmt: skip
"""Text twin and whole model; Llama 4, whose text model has no body of its own; scaled logits; a mask that is read; no
attention; and a type for each reason of a refusal."""
pytestmark = pytest.mark.skipif(
    transformers.__version__ != VERSION, reason=f"the page was written with transformers {VERSION} (`make models-page`)"
)


def test_the_page_lists_exactly_the_model_types_of_transformers():
    differing = sorted((LINES.keys() - {"model type", "---"}) ^ {*TYPES})
    assert not differing, (
        f"run: make models-page (it writes {PAGE.name}); the page and transformers differ in {differing}"
    )
    assert "FAILED" not in TEXT


@pytest.mark.parametrize(
    "kind", [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in TYPES]
)
def test_a_model_type_trains_as_what_it_is_or_is_refused_before_its_weights_are_read(kind):
    assert row(kind) == LINES[kind], "if this is meant, run: make models-page"
