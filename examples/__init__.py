"""Models written for ONE instance, each in a file to copy; run them with `python examples/NAME.py --help`."""
