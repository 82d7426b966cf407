"""Rollout engines: they sample completions, asynchronously, and take new weights in place.

Start with `requests.py`: `generate` samples the completions of prompts, `RequestEngine` is the base class of engines.
`native.py` is AtomRL's own engine (`decoder.py`, `batching.py`, `cache.py`, `paged.py`), `hf.py` the reference; vLLM
and SGLang run in this process or as servers (`servers.py`). `replicas.py` distributes requests over engines in Ray
actors, `episodes.py` makes an engine play episodes of several turns.
"""
