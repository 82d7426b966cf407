"""Code in completions is never compiled or run by a grader: watched by an audit hook in the worker processes."""

from __future__ import annotations

import json

import pytest

from benchmarks import audited, rewards


def test_no_payload_is_executed_and_the_hook_would_see_it(tmp_path, monkeypatch):
    """`boxed` here; `benchmarks/rewards.py` does it with all."""
    pytest.importorskip("math_verify")
    pytest.importorskip("reasoning_gym")
    log = tmp_path / "audit.jsonl"
    monkeypatch.setenv(audited.AUDIT_LOG, str(log))
    monkeypatch.setattr(rewards, "TIMEOUT_S", 60.0)

    def events():
        return [json.loads(line)["event"] for line in log.read_text().splitlines()]

    assert rewards.audited_call("boxed", rewards.payloads()) == 40
    assert set(events()) == {"hook"}
    assert rewards.audited_call("guilty", rewards.payloads()) == 40
    assert "compile" in events()
