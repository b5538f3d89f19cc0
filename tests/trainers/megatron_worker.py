"""A trainer process in which megatron-core runs on a CPU, for whole runs: `worker_cls` of `actor_train`."""

from __future__ import annotations

from roll.trainers.worker import TrainerSpec, TrainWorker
from tests.trainers import megatron_cpu_shim


class CpuTrainWorker(TrainWorker):
    """The built-in worker, once CUDA is answered for."""

    async def start(self, spec: TrainerSpec, master_address: str, master_port: int) -> None:
        megatron_cpu_shim.install()
        await super().start(spec, master_address, master_port)
