"""Questions about places, each of which needs a known number of searches: the task of the search quickstart.

"What is the population of the nearest larger place of Balkh?" is a question of two hops: the document of Balkh says
that it is Kunduz, and that of Kunduz has its population. The answer to a question of 1 to 4 hops cannot be guessed, and
takes as many searches; one of 0 hops ("What comes after 41?") takes none. The environment `places` answers searches,
and the reward `exact_match` scores answers.

Demonstrations search 0 to 3 times, by chance and whatever the question is, along its chain and beyond, and then give
the right answer, or `?` where they have not come to it. So a model that imitates them can search, and can read an
answer from what it found, but does not know how often to search; that is left to reinforcement learning.

There are 14,804 places in 191 countries, from GeoNames (https://www.geonames.org, CC BY 4.0; `tools/make_places.py`).
The nearest larger place is of the same country, so chains never leave it, and whole countries are of the eval split.
There are 10,494 places to ask about (those with a chain of five), and 10,000 questions of 0 hops.
"""

from __future__ import annotations

import lzma
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from typing import Any, NamedTuple

from atomrl.types import Message

FILE = Path(__file__).with_name("places.tsv.xz")
MAX_HOPS = 4
CHAIN = MAX_HOPS + 1
"""Places of a chain: one more than any question needs, so that a demonstration can go beyond it."""
SEARCHES = {0: 0.3, 1: 0.3, 2: 0.25, 3: 0.15}
"""How often a demonstration searches, and how many of them do."""
NUMBERS = 10_000
POPULATION, LARGER, NEXT = "What is the population of ", "the nearest larger place of ", "What comes after "
HAS, NEAR = ": population ", ", nearest larger place "
WORDS = (
    *(POPULATION, LARGER, NEXT, HAS, NEAR),
    *("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>"),
)
"""What a tokenizer for this task has as one token each. Digits are bytes, as letters are: copied in the same way."""


class Place(NamedTuple):
    """A row of the file."""

    name: str
    country: str
    """Two letters."""
    population: int
    larger: str
    """The nearest place of the country with more people; none of the largest one."""

    @property
    def document(self) -> str:
        """What a search for it finds."""
        return f"{self.name}{HAS}{self.population}" + (f"{NEAR}{self.larger}" if self.larger else "")


@cache
def read_places() -> dict[str, Place]:
    """All places by name.

    Example:
        >>> read_places()["Balkh"].document
        'Balkh: population 114883, nearest larger place Kunduz'
    """
    lines = lzma.decompress(FILE.read_bytes()).decode().splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return {name: Place(name, country, int(people), larger) for name, country, people, larger in rows}


def find(query: str) -> str:
    """What a search answers: the place's document, if there is one of that very name.

    Example:
        >>> find("Kabul"), find("Camelot")
        ('<information>Kabul: population 4434550</information>', '<information></information>')
    """
    place = read_places().get(query)
    return _information(place.document if place else "")


def _information(document: str) -> str:
    return f"<information>{document}</information>"


def chain_of(name: str) -> list[str]:
    """A place, the nearest larger one, and so on; at most `CHAIN`.

    Example:
        >>> chain_of("Balkh")
        ['Balkh', 'Kunduz', 'Kabul']
    """
    places, chain = read_places(), [name]
    while len(chain) < CHAIN and (larger := places[chain[-1]].larger):
        chain.append(larger)
    return chain


@cache
def _to_ask_about() -> list[str]:
    return [name for name in read_places() if len(chain_of(name)) == CHAIN]


def _respelt(rng: random.Random, names: Sequence[str]) -> list[str]:
    """Names of as many letters, whichever: nothing but copying spells them."""
    letters = [rng.choices(ascii_lowercase, k=len(name)) for name in names]
    return ["".join(chosen).capitalize() for chosen in letters]


def make(rng: random.Random, hops: Sequence[int] = (0, 1, 1, 2, 2, 3), respelt: float = 0.0) -> dict[str, Any]:
    """One problem.

    Args:
        rng: where chance comes from.
        hops: how many searches a problem may take, 0 to 4; one that is there twice comes twice as often.
        respelt: share of problems about places whose names are made up. No search finds them, so they are for
            demonstrations alone, which have what it would find: spelling them is copying, and nothing learned by heart.

    Raises:
        ValueError: a number of hops is another, or `respelt` is no share.

    Example:
        >>> row = make(random.Random(1), hops=[2])
        >>> row["prompt"], row["ground_truth"], row["data_source"]
        ('What is the population of the nearest larger place of Tulsa?', '633104', 'places-2')
    """
    if not hops or not set(hops) <= set(range(MAX_HOPS + 1)):
        raise ValueError(f"hops must be a list of numbers from 0 to {MAX_HOPS}, got {hops}")
    if not 0.0 <= respelt <= 1.0:
        raise ValueError(f"respelt must be between 0 and 1, got {respelt}")
    number = rng.choice(hops)
    if number == 0:
        start = str(rng.randrange(NUMBERS))
        prompt, answer, country, chain = f"{NEXT}{start}?", int(start) + 1, "", [start] * CHAIN
        found = [""] * CHAIN
    else:
        chain = chain_of(rng.choice(_to_ask_about()))
        places = [read_places()[name] for name in chain]
        answer, country = places[number - 1].population, places[0].country
        if respelt and rng.random() < respelt:
            chain = _respelt(rng, chain)
            larger = [*chain[1:], places[-1].larger]
            places = [p._replace(name=n, larger=x) for p, n, x in zip(places, chain, larger, strict=True)]
        prompt, found = f"{POPULATION}{LARGER * (number - 1)}{chain[0]}?", [place.document for place in places]
    return {
        "prompt": prompt,
        "ground_truth": str(answer),
        "data_source": f"places-{number}",
        "country": country,
        "chain": chain,
        "found": [*map(_information, found)],
        "hops": number,
    }


def split_by(row: dict[str, Any]) -> str:
    """The country, or the question that is about none."""
    return str(row["country"] or row["prompt"])


def demonstrate(rng: random.Random, row: dict[str, Any]) -> list[Message]:
    """Searches, each with its answer, as many as chance says; then the right answer to the question, or `?` if it takes
    more of them: an answer that nothing before it says would teach to invent one.

    Example:
        >>> chain = ["Balkh", "Kunduz", "Kabul"]
        >>> row = {"chain": chain, "found": [*map(find, chain)], "ground_truth": "114883", "hops": 1}
        >>> [message["content"] for message in demonstrate(random.Random(1), row)]
        ['<answer>?</answer>']
        >>> [message["role"] for message in demonstrate(random.Random(0), row)]
        ['assistant', 'environment', 'assistant', 'environment', 'assistant']
    """
    (searches,) = rng.choices([*SEARCHES], [*SEARCHES.values()])
    messages = []
    for name, found in zip(row["chain"][:searches], row["found"], strict=False):
        messages.append(Message(role="assistant", content=f"<search>{name}</search>"))
        messages.append(Message(role="environment", content=found))
    answer = row["ground_truth"] if searches >= row["hops"] else "?"
    return [*messages, Message(role="assistant", content=f"<answer>{answer}</answer>")]
