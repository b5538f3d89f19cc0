"""Processes that write down on which node of Ray they are and which weights they load, named in the configurations of
tests as `node_witnesses:Name`."""

import json
from pathlib import Path

import ray

from roll.engines.worker import InferWorker
from roll.trainers.worker import TrainWorker

FILE = "witnessed.jsonl"


def write_down(identity, **facts):
    """Add a line to the file in the folder of the run's logs."""
    node = ray.get_runtime_context().get_node_id()
    with open(Path(identity.log_dir) / FILE, "a") as file:
        file.write(json.dumps({"role": identity.role, "node": node, **facts}) + "\n")


class WitnessTrainer(TrainWorker):
    async def start(self, spec, *rendezvous):
        write_down(self.identity, transport=spec.transport.name)
        return await super().start(spec, *rendezvous)


class WitnessEngine(InferWorker):
    async def start(self, spec):
        write_down(self.identity, transport=spec.transport)
        await super().start(spec)

    async def load_weights(self, publication, *settings):
        receipt, seconds = await super().load_weights(publication, *settings)
        write_down(self.identity, version=receipt.version)
        return receipt, seconds
