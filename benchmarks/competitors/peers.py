"""Peers: other libraries that do this work, each optional, left out with the reason where it is missing.

In: a peer's name. Out: its adapter module, or PeerUnavailable with what is missing and how to get it.

    trees = find_peer("dynet")               # benchmarks.competitors.dynet_peer
    hand = trees.DyNetTreeLSTM(model)
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


class PeerUnavailable(Exception):
    """A peer can't be imported; the message says why."""


@dataclass(frozen=True)
class Peer:
    """The module that adapts a library, which it imports; `install` is what the package registry calls it."""

    name: str
    adapter: str
    install: str


PEERS = {
    peer.name: peer
    for peer in (
        # The last release of DyNet has wheels under a name of its own.
        Peer("dynet", "benchmarks.competitors.dynet_peer", "dyNET38"),
        # From 2.0 on DGL needs the PyTorch release that it was built for.
        Peer("dgl", "benchmarks.competitors.dgl_peer", "'dgl<2'"),
        Peer("pyg", "benchmarks.competitors.pyg_peer", "torch_geometric"),
    )
}


def find_peer(name: str) -> ModuleType:
    """The adapter of a peer; PeerUnavailable where its library can't be imported here."""
    peer = PEERS[name]
    try:
        return importlib.import_module(peer.adapter)  # and no library before it: DyNet is configured there
    except (
        ImportError,
        OSError,
        RuntimeError,
        AttributeError,
    ) as error:  # native libraries fail in many ways
        reason = f"can't be imported ({type(error).__name__}: {error})"
        raise PeerUnavailable(f"{peer.name}: {reason}; pip install {peer.install}") from error
