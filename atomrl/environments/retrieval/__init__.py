"""Search in a corpus: an index on disk, and a service that answers as those of Search-R1, verl and SkyRL."""
