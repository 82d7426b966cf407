"""Configs of verl, TRL and OpenRLHF as configs of this package. Nothing in what is read is executed."""

from atomrl.tools.importers.translate import LIBRARIES, Imported, import_config

__all__ = ["LIBRARIES", "Imported", "import_config"]
