"""Where this project keeps what it may make again: the user's cache folder.

cache_folder()               # ~/.cache/fxbatch, $XDG_CACHE_HOME/fxbatch, or what the system has in its place
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """The user's cache folder of this project; `fxbatch data get` fills it. Not made here."""
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "fxbatch"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "fxbatch"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "fxbatch"
    return Path.home() / ".cache" / "fxbatch"
