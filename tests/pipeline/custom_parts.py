"""Parts of a user's own, named in the configurations of tests as `custom_parts:Name`."""

import resource

from roll.distributed.train_worker import TrainWorker
from roll.pipeline.stages import AdvantageStage


class HalvedAdvantages(AdvantageStage):
    """Advantages half as large as the built-in ones."""

    async def process(self, batch):
        batch = await super().process(batch)
        batch.data.tokens["advantages"] *= 0.5
        batch.metrics["advantage/halved"] = 1.0
        return batch


class CountingTrainer(TrainWorker):
    """A trainer that also says how many samples it saw."""

    async def train(self, batch, objective, plan):
        return {**await super().train(batch, objective, plan), "samples_seen": float(len(batch))}


class TightTrainWorker(TrainWorker):
    """A trainer that may write no large files, as if the disk were full."""

    async def snapshot(self, folder):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, resource.RLIM_INFINITY))
        await super().snapshot(folder)


class NotAStage:
    """Cannot stand in for a stage."""
