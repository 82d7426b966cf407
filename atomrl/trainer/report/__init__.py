"""Report of a step: its metrics under verl's names, seconds by phase, and the tokens that it records."""
