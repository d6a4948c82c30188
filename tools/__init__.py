"""The command `fxbatch`. Installed as the package `fxbatch_cli`: pyproject.toml maps this folder to it."""
