"""Neural programmer-interpreter (AlphaNPI, Pierrot et al. 2019): an LSTM that calls programs on a list of digits.

Training: policy and value along an episode of 5 to 15 calls. Inference: the repository's interpreter plays, each call
the best one, until the program stops or is 10 calls deep. The repository's own environment, encoder and sizes.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.public.model import Driver, Load, PublicModel
from benchmarks.public.sources import Source

LENGTH, CALLS = 5, 10

SOURCE = Source("instadeepai/AlphaNPI", "7373a2c1efec7f208ae4549ac511a796d740b535")


def build(load: Load) -> Driver:
    lists, policies, conf = load("environments.list_env"), load("core.policy"), load("core.config")

    def environment() -> Any:
        return lists.ListEnv(length=LENGTH, encoding_dim=conf.encoding_dim)

    class Interpreter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            env = environment()
            programs = env.programs_library.values()
            self.policy = policies.Policy(
                lists.ListEnvEncoder(env.get_observation_dim(), conf.encoding_dim),
                conf.hidden_size,
                env.get_num_programs(),
                env.get_num_non_primary_programs(),
                conf.program_embedding_dim,
                conf.encoding_dim,
                [p["index"] for p in programs if p["level"] > 0],
                conf.learning_rate,
            )

        def forward(
            self, env: Any, task: int, observations: list[Tensor], labels: list[Tensor], value: Tensor
        ) -> Any:
            return self.episode(task, observations, labels, value) if self.training else self.play(env, task)

        def episode(
            self, task: int, observations: list[Tensor], labels: list[Tensor], value: Tensor
        ) -> Tensor:
            h, c = self.policy.init_tensors()
            losses = []
            for observation, label in zip(observations, labels, strict=True):
                actor, critic, h, c = self.policy.predict_on_batch(observation.view(1, -1), [task], h, c)
                losses.append(-torch.mean(label * torch.log(actor), dim=-1).mean())
                losses.append(torch.pow(critic - value, 2).mean())
            return sum(losses) / len(losses)  # type: ignore[return-value]

        def play(self, env: Any, task: int) -> Tensor:
            observation = env.start_task(task)
            h, c = self.policy.init_tensors()
            priors = torch.zeros(())
            for _ in range(CALLS):
                mask = env.get_mask_over_actions(task)
                priors, _, h, c = self.policy.forward_once(observation, task, h, c)
                priors = torch.squeeze(priors * torch.FloatTensor(mask))
                program = env.get_program_from_index(torch.argmax(priors).item())
                if program == "STOP" or env.programs_library[program]["level"] > 0:
                    break
                observation = env.act(program)
            env.end_task()
            return priors

    def instances(number: int, count: int) -> list[tuple[Any, ...]]:
        choose, generator = random.Random(number), torch.Generator().manual_seed(number)
        found = []
        for _ in range(count):
            env = environment()
            tasks = [p["index"] for p in env.programs_library.values() if p["level"] > 0]
            np.random.seed(choose.randrange(1 << 30))  # noqa: NPY002 - the one that the environment draws from
            steps = choose.randint(5, 15)
            observations = [torch.rand(env.get_observation_dim(), generator=generator) for _ in range(steps)]
            labels = [
                torch.rand(1, env.get_num_programs(), generator=generator).softmax(-1) for _ in range(steps)
            ]
            found.append(
                (env, choose.choice(tasks), observations, labels, torch.rand(1, 1, generator=generator))
            )
        return found

    return Driver(Interpreter, instances)


MODEL = PublicModel("AlphaNPI", "program interpreter", SOURCE, build)
