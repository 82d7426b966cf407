"""Training back ends: what turns a batch and an algorithm into new weights."""
