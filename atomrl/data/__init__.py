"""Data: rows of files, the hub and generators become prompts; trajectories become rows of tensors.

Start with `problems.py`: `load_problems` reads a split, `DataProcessor` renders and tokenizes prompts. `curriculum.py`
chooses the prompts, and the groups that are trained on. `files.py` reads rows with the place of every error, `tasks.py`
has the generators. Demonstrations and preferences are in `offline.py`, text for pretraining in `text.py`. `rows.py`
turns scored trajectories into batches.
"""
