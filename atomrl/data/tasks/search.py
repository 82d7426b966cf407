"""Questions about places that need a known number of searches: the task of the search quickstart.

"What is the population of the nearest larger place of Balkh?" is a question of two hops: the document of Balkh says
that it is Kunduz, and that of Kunduz has its population. Questions of 1 to 4 hops cannot be guessed and need as many
searches; those of 0 hops ("What comes after 41?") need none. The environment `places` answers searches, and the
reward `exact_match` scores answers.

Demonstrations search 0 to 3 times along the chain, a random number that does not depend on the question, and then
give the right answer, or `?` if they have not reached it. So a model that imitates them can search and can read an
answer from a document, but has to learn by reinforcement how often to search.

There are 14,804 places in 191 countries, from GeoNames (https://www.geonames.org, CC BY 4.0; `tools/make_places.py`).
The nearest larger place is in the same country, so chains never leave it, and whole countries are of the eval split.
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
"""Places in a chain: one more than any question needs, so that a demonstration can search beyond it."""
SEARCHES = {0: 0.3, 1: 0.3, 2: 0.25, 3: 0.15}
"""Number of searches in a demonstration -> its probability."""
NUMBERS = 10_000
POPULATION, LARGER, NEXT = "What is the population of ", "the nearest larger place of ", "What comes after "
HAS, NEAR = ": population ", ", nearest larger place "
WORDS = (
    *(POPULATION, LARGER, NEXT, HAS, NEAR),
    *("<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>"),
)
"""Strings that a tokenizer for this task encodes as one token each. Digits and letters are single bytes, so that names
and numbers are copied in the same way."""


class Place(NamedTuple):
    """A row of the file of places."""

    name: str
    country: str
    """Two letters."""
    population: int
    larger: str
    """The nearest place in the country with more people; "" for the largest one."""

    @property
    def document(self) -> str:
        """The text that a search for the place returns."""
        return f"{self.name}{HAS}{self.population}" + (f"{NEAR}{self.larger}" if self.larger else "")


@cache
def read_places() -> dict[str, Place]:
    """Return all places by name.

    Example:
        >>> read_places()["Balkh"].document
        'Balkh: population 114883, nearest larger place Kunduz'
    """
    lines = lzma.decompress(FILE.read_bytes()).decode().splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return {name: Place(name, country, int(people), larger) for name, country, people, larger in rows}


def find(query: str) -> str:
    """Search for a place by its exact name; an empty result if there is none.

    Example:
        >>> find("Kabul"), find("Camelot")
        ('<information>Kabul: population 4434550</information>', '<information></information>')
    """
    place = read_places().get(query)
    return _information(place.document if place else "")


def _information(document: str) -> str:
    return f"<information>{document}</information>"


def chain_of(name: str) -> list[str]:
    """Return a place, the nearest larger one, and so on; at most `CHAIN` places.

    Example:
        >>> chain_of("Balkh")
        ['Balkh', 'Kunduz', 'Kabul']
    """
    places, chain = read_places(), [name]
    while len(chain) < CHAIN and (larger := places[chain[-1]].larger):
        chain.append(larger)
    return chain


@cache
def _askable() -> list[str]:
    """Return the places with a full chain."""
    return [name for name in read_places() if len(chain_of(name)) == CHAIN]


def _respelt(rng: random.Random, names: Sequence[str]) -> list[str]:
    """Replace names by random ones of the same length, which a model can only copy."""
    letters = [rng.choices(ascii_lowercase, k=len(name)) for name in names]
    return ["".join(chosen).capitalize() for chosen in letters]


def make(rng: random.Random, hops: Sequence[int] = (0, 1, 1, 2, 2, 3), respelt: float = 0.0) -> dict[str, Any]:
    """Draw one problem.

    Args:
        rng: random number generator.
        hops: numbers of searches to draw from, 0 to 4; a repeated number is drawn more often.
        respelt: share of problems with made-up names. No search finds these places, so they are for demonstrations
            only, which contain the results: names can then only be copied, not memorised.

    Raises:
        ValueError: a number of hops is out of range, or `respelt` is not between 0 and 1.

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
        documents = [""] * CHAIN
    else:
        chain = chain_of(rng.choice(_askable()))
        places = [read_places()[name] for name in chain]
        answer, country = places[number - 1].population, places[0].country
        if respelt and rng.random() < respelt:
            chain = _respelt(rng, chain)
            larger = [*chain[1:], places[-1].larger]
            places = [p._replace(name=n, larger=x) for p, n, x in zip(places, chain, larger, strict=True)]
        prompt = f"{POPULATION}{LARGER * (number - 1)}{chain[0]}?"
        documents = [place.document for place in places]
    return {
        "prompt": prompt,
        "ground_truth": str(answer),
        "data_source": f"places-{number}",
        "country": country,
        "chain": chain,
        "found": [*map(_information, documents)],
        "hops": number,
    }


def split_by(row: dict[str, Any]) -> str:
    """Return the key of the split: the country, or the question if it has none."""
    return str(row["country"] or row["prompt"])


def demonstrate(rng: random.Random, row: dict[str, Any]) -> list[Message]:
    """Write a demonstration: a random number of searches with their results, then the answer.

    The answer is `?` if the question needs more searches: an answer that no result contains would teach the model to
    invent one.

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
    for name, result in zip(row["chain"][:searches], row["found"], strict=False):
        messages.append(Message(role="assistant", content=f"<search>{name}</search>"))
        messages.append(Message(role="environment", content=result))
    answer = row["ground_truth"] if searches >= row["hops"] else "?"
    return [*messages, Message(role="assistant", content=f"<answer>{answer}</answer>")]
