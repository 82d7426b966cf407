"""The task `places`: chains that end, countries that are held out, demonstrations whose searches are no hint."""

import random
import re
from collections import Counter

import pytest

from atomrl.data.files import DataError
from atomrl.data.tasks import generate, row_split
from atomrl.data.tasks import search as places
from atomrl.data.tokenized import TokenizedSamples


def test_every_chain_ends_with_the_largest_place_of_its_country():
    known = places.read_places()
    assert len(known) == 14_804 and len({place.country for place in known.values()}) == 191
    for place in known.values():
        assert re.fullmatch("[A-Z][a-z]{3,8}", place.name) and place.population >= 15_000
        if place.larger:
            larger = known[place.larger]
            assert larger.country == place.country
            assert (-larger.population, larger.name) < (-place.population, place.name), "a chain might cycle"
    largest = [place for place in known.values() if not place.larger]
    assert len({place.country for place in largest}) == len(largest) == 191


def test_answers_are_what_the_documents_say():
    for row in generate("places", 500, hops=[1, 2, 3, 4]):
        *steps, name = row["prompt"].removeprefix("What is the population of ").removesuffix("?").split(" of ")
        for _ in steps:
            name = re.search("nearest larger place (.*)</", places.find(name))[1]
        assert re.search(r"population (\d+)", places.find(name))[1] == row["ground_truth"]
        assert row["data_source"] == f"places-{len(steps) + 1}"
    for row in generate("places", 50, hops=[0]):
        assert int(row["ground_truth"]) == int(re.search(r"(\d+)\?", row["prompt"])[1]) + 1


def test_a_country_is_in_one_split_alone_and_so_is_every_place_that_is_found():
    problems = {split: generate("places", size, split=split) for split, size in (("train", 4000), ("eval", 2000))}
    countries = {split: {row["country"] for row in rows} - {""} for split, rows in problems.items()}
    names = {split: {name for row in rows for name in row["chain"]} for split, rows in problems.items()}
    assert not countries["train"] & countries["eval"] and not names["train"] & names["eval"]
    assert len(countries["train"]) > 90 and len(countries["eval"]) > 10
    assert {row_split("places", row) for row in problems["eval"]} == {"eval"}
    assert not {row["prompt"] for row in problems["train"]} & {row["prompt"] for row in problems["eval"]}


def test_how_often_a_demonstration_searches_says_nothing_of_the_question():
    for hops in (0, 1, 3):
        (row,) = generate("places", 1, hops=[hops])
        demonstrations = [places.demonstrate(random.Random(seed), row) for seed in range(2000)]
        counts = Counter(len(messages) // 2 for messages in demonstrations)
        shares = {searches: count / 2000 for searches, count in counts.items()}
        assert shares == pytest.approx(places.SEARCHES, abs=0.04)
        for messages in demonstrations:
            enough = len(messages) // 2 >= hops
            assert messages[-1]["content"] == f"<answer>{row['ground_truth'] if enough else '?'}</answer>"
    longest = max(demonstrations, key=len)
    assert [message["content"] for message in longest[1:-1:2]] == [places.find(name) for name in row["chain"][:3]]


def test_made_up_names_are_found_in_demonstrations_alone():
    rows = generate("places", 400, hops=[1, 3], respelt=0.5)
    known = places.read_places()
    made_up = [row for row in rows if row["chain"][0] not in known]
    assert len(made_up) == pytest.approx(200, abs=40)
    for row in made_up:
        assert places.find(row["chain"][0]) == "<information></information>"
        assert f" of {row['chain'][0]}?" in row["prompt"]
        for result, name, larger in zip(row["found"], row["chain"], row["chain"][1:], strict=False):
            assert result.startswith(f"<information>{name}: ") and result.endswith(f" {larger}</information>")
        assert f" {row['ground_truth']}, " in row["found"][row["hops"] - 1]
    for row in (row for row in rows if row not in made_up):
        assert row["found"] == [places.find(name) for name in row["chain"]]
    assert generate("places", 50) == generate("places", 50, respelt=0.0)


def test_what_hops_may_be():
    with pytest.raises(DataError, match="0 to 4"):
        generate("places", 1, hops=[5])
    with pytest.raises(DataError, match="0 to 4"):
        generate("places", 1, hops=[])
    with pytest.raises(DataError, match="respelt"):
        generate("places", 1, respelt=50)


def test_demonstrations_train_the_searches_and_not_their_answers(tokenizer):
    from atomrl.config import DataConfig
    from atomrl.data.problems import load_problems
    from atomrl.data.processor import DataProcessor

    config = DataConfig(train="places", train_size=20, generator_args={"hops": [3]})
    data = TokenizedSamples(load_problems(config, completions="demonstrate"), DataProcessor(tokenizer, config), "x")
    rows = data.rows([(f"{epoch}:{sample.problem_id}", sample) for epoch in range(3) for sample in data.problems])
    seen = Counter()
    for tokens, mask, length in zip(rows.tokens, rows.loss_mask, rows.lengths, strict=True):
        own, other = tokenizer.decode(tokens[mask]), tokenizer.decode(tokens[:length][~mask[:length]])
        assert re.fullmatch(r"(<search>\w+</search>)*<answer>(\d+|\?)</answer><\|end\|>", own), own
        assert own.count("<search>") == other.count("<information>") == other.count("</information>")
        seen[own.count("<search>")] += 1
    assert set(seen) == {0, 1, 2, 3}


@pytest.fixture(scope="module")
def tokenizer():
    from atomrl.models.tokenizer import make_tokenizer

    return make_tokenizer(places.WORDS)
