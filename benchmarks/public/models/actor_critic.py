"""Asynchronous advantage actor-critic: convolutions and an LSTM cell over the frames of a game.

Training: the loss of the repository's `train`, over an episode of 4 to 8 frames that was played before, with its
actions and rewards. Inference: greedy, as in its `test`, in a made-up game whose frame depends on the action.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Source

ACTIONS, GAMMA, LAMBDA, ENTROPY, VALUE = 6, 0.99, 1.0, 0.01, 0.5  # the repository's

SOURCE = Source("ikostrikov/pytorch-a3c", "48d95844755e2c3e2c7e48bbd1a7141f7212b63f")


def build(load: Load) -> Driver:
    models = load("model")

    class Player(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = models.ActorCritic(1, SimpleNamespace(n=ACTIONS))

        def forward(self, frames: Tensor, actions: list[int], rewards: list[float]) -> Tensor:
            return self.loss(frames, actions, rewards) if self.training else self.play(frames)

        def loss(self, frames: Tensor, actions: list[int], rewards: list[float]) -> Tensor:
            hx, cx = torch.zeros(1, 256), torch.zeros(1, 256)
            values, chosen, entropies = [], [], []
            for frame, action in zip(frames, actions, strict=True):
                value, logit, (hx, cx) = self.net((frame.unsqueeze(0), (hx, cx)))
                prob, log_prob = F.softmax(logit, dim=-1), F.log_softmax(logit, dim=-1)
                entropies.append(-(log_prob * prob).sum(1, keepdim=True))
                chosen.append(log_prob.gather(1, torch.tensor([[action]])))
                values.append(value)
            policy_loss: Any = 0
            value_loss: Any = 0
            values.append(torch.zeros(1, 1))
            reward, advantage_so_far = torch.zeros(1, 1), torch.zeros(1, 1)
            for i in reversed(range(len(rewards))):
                reward = GAMMA * reward + rewards[i]
                value_loss = value_loss + 0.5 * (reward - values[i]).pow(2)
                delta = rewards[i] + GAMMA * values[i + 1] - values[i]
                advantage_so_far = advantage_so_far * GAMMA * LAMBDA + delta
                policy_loss = policy_loss - chosen[i] * advantage_so_far.detach() - ENTROPY * entropies[i]
            return (policy_loss + VALUE * value_loss).sum()

        def play(self, frames: Tensor) -> Tensor:
            hx, cx = torch.zeros(1, 256), torch.zeros(1, 256)
            at, played = 0, []
            for _ in range(len(frames)):
                _, logit, (hx, cx) = self.net((frames[at].unsqueeze(0), (hx, cx)))
                prob = F.softmax(logit, dim=-1)
                action = prob.max(1, keepdim=True)[1].numpy()
                played.append(int(action[0, 0]))
                at = (at + 1 + played[-1]) % len(frames)
            return torch.tensor(played)

    return Driver(Player, instances)


def instances(number: int, count: int) -> list[tuple[Any, ...]]:
    """Frames `[T, 1, 42, 42]`, actions, rewards."""
    generator = torch.Generator().manual_seed(number)
    found = []
    for _ in range(count):
        length = int(torch.randint(4, 9, (), generator=generator))
        frames = torch.randn(length, 1, 42, 42, generator=generator)
        actions = torch.randint(ACTIONS, (length,), generator=generator).tolist()
        found.append((frames, actions, torch.randint(-1, 2, (length,), generator=generator).float().tolist()))
    return found


MODEL = PublicModel("A3C", "policy with memory", SOURCE, build, {"out": "list"})
