"""Sandbox for model-written Python: bubblewrap, without network and without access to this machine's files.

Example:
    >>> from atomrl.sandbox import Limits
    >>> Limits().processes
    1
"""

from atomrl.sandbox.box import Limits as Limits
from atomrl.sandbox.box import Sandbox as Sandbox
from atomrl.sandbox.running import Result as Result
from atomrl.sandbox.running import SandboxError as SandboxError
from atomrl.sandbox.running import check as check
from atomrl.sandbox.running import run as run
