"""Import configs and scripts of verl, TRL and OpenRLHF. Nothing in them is executed."""

from atomrl.tools.importers.translate import LIBRARIES, Imported, import_config

__all__ = ["LIBRARIES", "Imported", "import_config"]
