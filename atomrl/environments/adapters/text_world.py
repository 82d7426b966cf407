"""TextWorld's games, from their files."""

from collections.abc import Generator

from atomrl.episodes import Reply, Role
from atomrl.types import Sample


def play(sample: Sample, *, role: Role = "user") -> Generator[Reply, str, float]:
    """An episode of the game in the file that the row's column `game` names (`.z8`, as `tw-make` writes).

    The model writes a command a turn: its last line that is not empty. Points are rewards of the turns, as shares of
    the most that the game gives, and the last ones the outcome.
    """
    import textworld

    game = textworld.start(sample.columns["game"], textworld.EnvInfos(max_score=True))
    try:
        state, score, ended, reward = game.reset(), 0.0, False, None
        while not ended:
            text = yield Reply(text=state.feedback.strip(), role=role, reward=reward)
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            before = score
            state, score, ended = game.step(lines[-1] if lines else "look")
            reward = (score - before) / max(1, state.max_score)
        return float(reward or 0.0)
    finally:
        game.close()
