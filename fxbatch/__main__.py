"""`python -m fxbatch`: the command of the same name."""

from __future__ import annotations

import sys

from fxbatch_cli.main import main

if __name__ == "__main__":
    sys.exit(main())
