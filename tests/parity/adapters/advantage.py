"""Advantages: from rewards to what each token is credited with."""

from __future__ import annotations

from typing import Any

ADAPTERS: dict[str, Any] = {}
