"""The web interface on run folders: a process of its own, which reads them, and writes nothing into them."""
