"""A stand-in for SGLang, which needs a GPU and cannot run where these tests do.

What it is: a real server in a process of its own, with a real (tiny) model, that answers the calls which the adapter
makes of the real one. Its behaviour was read from the sources of SGLang 0.5.23: ``entrypoints/http_server.py``,
``managers/{tokenizer_manager,scheduler,schedule_batch,io_struct}.py``, ``layers/sampler.py``,
``managers/scheduler_components/weight_updater.py``, ``utils/weight_versions.py``. Oddities that the adapter has to live
with are kept: a pause is answered before it has happened, an abort takes every request whose name begins with the given
one and needs one more step, a flush is refused while requests run in place, a failed load leaves a mixture.

What it does not show: that the real server behaves so, on GPUs, split over several of them, or under load.
"""
