"""The section `tracking`: what of a run is written down, and where it goes beside the run's folder."""

from typing import Literal, Self

from pydantic import Field, model_validator

from atomrl.config.base import Section


class TrackingConfig(Section):
    """Where metrics go beside `metrics.jsonl`."""

    sinks: list[Literal["tensorboard", "wandb", "mlflow", "trackio"]] = []
    wandb_project: str = "atomrl"
    wandb_entity: str | None = None
    wandb_tags: list[str] = []
    log_every_steps: int = Field(1, ge=1)
    """Of the sinks; `metrics.jsonl` has every step."""
    save_rollouts: bool = True
    tokens: float = Field(2, ge=0)
    """Of which groups the numbers of every token are kept beside their rollouts (docs/guides/inspect_tokens.md): below
    1 a share of the prompts, the same ones in the whole run; from 1 on so many groups of each step, those whose
    rewards differ before others. 0: none."""
    log_completions: int = Field(10, ge=0)
    """Show a few completions on the terminal, with reward and advantage: of the first step, and every so many steps.
    true: of every step; false or 0: never."""

    @model_validator(mode="after")
    def _whole_groups(self) -> Self:
        if self.tokens >= 1 and self.tokens % 1:
            raise ValueError(f"tokens={self.tokens:g} is neither a share below 1 nor a whole number of groups")
        return self
