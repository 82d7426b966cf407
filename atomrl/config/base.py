"""What every part of the config is made of."""

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """A mistake in a config; the message says which key, what is wrong and what to do."""


class Section(BaseModel):
    """A group of keys. Unknown keys are errors, and values cannot be changed."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, protected_namespaces=(), allow_inf_nan=False
    )
