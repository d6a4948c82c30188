"""Readers for the data sets of the examples: treebanks, CoNLL-U, IOB2, molecules; where they are."""

from __future__ import annotations

from fxbatch.data.paths import DATA_SETS, DataSet, cache_folder, find_data, locate, search_folders
from fxbatch.data.sst import Tree, parse_tree, read_sst, read_trees
from fxbatch.data.vocabulary import Vocabulary

__all__ = [
    "DATA_SETS",
    "DataSet",
    "Tree",
    "Vocabulary",
    "cache_folder",
    "find_data",
    "locate",
    "parse_tree",
    "read_sst",
    "read_trees",
    "search_folders",
]
