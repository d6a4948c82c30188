"""Show what batching did: calls and launches, what did not batch and why.

examples:
  fxbatch explain examples/tree_lstm.py:minibatch
  fxbatch explain model.py:minibatch --arg trees=8 --option schedule=depth
  fxbatch explain model.py:minibatch --format json | jq .advice

One row of the table is one operation with the shapes that it met. Operations
are (rule 1) modules of torch.nn, (rule 2) your submodules called with tensors
and plain values, (rule 3) what is marked @fxbatch.operation, and (rule 4) other
functions of torch. docs/explain.md explains every column and line.
"""

from __future__ import annotations

import argparse
import json
import sys

import fxbatch
from fxbatch.viz.describe import SCHEMA_VERSION

from .errors import CommandError, Status
from .forms import add_option_argument, parse_options, user_errors
from .run_target import model_arguments
from .target import add_target_arguments, load_target
from .terminal import doing, output


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    add_option_argument(parser)
    parser.add_argument("--verbose", action="store_true", help="memory, copies and matrix products, too")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: text")


def run(options: argparse.Namespace) -> int:
    model, instances = load_target(options.target, options.arg)
    if not len(instances):
        raise CommandError(f"{options.target} returned no instances", status=Status.MODEL)
    with user_errors(options.target), doing(f"{len(instances)} instances: recording, batching, running"):
        explanation = fxbatch.explain(
            model, *model_arguments(model, instances), **parse_options(options.option)
        )
    if options.format == "json":
        head = {"schema": "fxbatch", "version": SCHEMA_VERSION, "form": "explanation"}
        sys.stdout.write(json.dumps({**head, **explanation.to_dict()}) + "\n")
    else:
        output().print(explanation)
        for line in explanation.details if options.verbose else ():
            output().print(line, markup=False, highlight=False)
    return Status.OK
