"""The files of other libraries are read, and never imported."""

collect_ignore = ["files"]
