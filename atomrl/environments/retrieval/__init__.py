"""Search in a corpus: an index on disk, and a server with the API of those of Search-R1, verl and SkyRL."""
