"""What SGLang's main process does: HTTP in and out, and the requests that wait while generation is paused."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
from collections.abc import Callable
from typing import Any

from aiohttp import web

from sglang.srt.server_args import ServerArgs
from sglang.stand_in_scheduler import Req, Scheduler
from tests.engines.sglang_interface import problems_of_call, unknown_in_answer


def run_server(server_args: ServerArgs) -> None:
    """Serve until killed."""
    web.run_app(
        StandIn(server_args).app(), host=server_args.host, port=server_args.port, print=None, shutdown_timeout=0.1
    )


def check_answer(path: str, content: object) -> None:
    """Fail where this answer has a name that the real server's has not."""
    unknown = unknown_in_answer(path, content)
    assert not unknown, f"SGLang's answer to {path} has no {sorted(unknown)}"


class StandIn:
    """The server."""

    def __init__(self, args: ServerArgs) -> None:
        self.args = args
        self.scheduler = Scheduler(args)
        self.orders: asyncio.Queue[tuple[Callable[[], Any], asyncio.Future[Any]]] = asyncio.Queue()
        self.outputs: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self.version = args.weight_version
        self.paused = asyncio.Condition()
        self.is_paused = False
        self.warm = False

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._authorised], client_max_size=2**30)
        for path in ("health", "server_info", "model_info"):
            app.router.add_get(f"/{path}", getattr(self, path))
        for path in (
            "generate abort_request pause_generation continue_generation flush_cache update_weights_from_disk "
            "weights_checker get_weights_by_name release_memory_occupation resume_memory_occupation"
        ).split():
            app.router.add_post(f"/{path}", getattr(self, path))
        app.router.add_get("/v1/loads", self.loads)
        app.on_startup.append(self._begin)
        return app

    @web.middleware
    async def _authorised(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path != "/health" and request.headers.get("Authorization") != f"Bearer {self.args.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = await request.json() if request.can_read_body else None
        problems = problems_of_call(request.method, request.path, request.query, body)
        if problems:
            return web.json_response({"error": {"message": "; ".join(problems)}}, status=422)
        answer = await handler(request)
        if isinstance(answer, web.Response) and answer.status == 200 and answer.content_type == "application/json":
            check_answer(request.path, json.loads(answer.text))
        return answer

    async def _begin(self, app: web.Application) -> None:
        self.loop = asyncio.create_task(self._schedule())

    async def _schedule(self) -> None:
        """Orders between steps, in the order in which they came."""
        try:
            while True:
                while not self.scheduler.has_work or not self.orders.empty():
                    order, answer = await self.orders.get()
                    answer.set_result(order())
                for req in await asyncio.to_thread(self.scheduler.step):
                    self._tell(req)
        except AssertionError:
            os.kill(os.getpid(), 9)

    def _order(self, order: Callable[[], Any]) -> asyncio.Future[Any]:
        answer = asyncio.get_running_loop().create_future()
        self.orders.put_nowait((order, answer))
        return answer

    def _tell(self, req: Req) -> None:
        if req.rid not in self.outputs:
            return
        new = slice(req.sent, None)
        told = {
            "id": req.rid,
            "finish_reason": req.finished,
            "prompt_tokens": len(req.input_ids),
            "completion_tokens": len(req.output_ids),
            "cached_tokens": 0,  # it computes every prompt anew
            "weight_version": self.version,
        }
        if req.masked:
            told["output_token_sampling_logprobs"] = req.mask_logprobs[new]
        else:
            pairs = zip(req.logprobs[new], req.output_ids[new], strict=True)
            told["output_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        if req.input_logprobs is not None:
            pairs = zip(req.input_logprobs, req.input_ids, strict=True)
            told["input_token_logprobs"] = [[logprob, token, None] for logprob, token in pairs]
        if req.finished is not None:
            told["weight_versions"] = req.spans(self.scheduler.version)
            if req.routed and self.args.enable_return_routed_experts:
                told["routed_experts"] = base64.b64encode(self.scheduler.experts(req).tobytes()).decode()
        message = {"output_ids": req.output_ids[new], "meta_info": told}
        check_answer("/generate", message)
        self.outputs[req.rid].put_nowait(message)
        req.sent = len(req.output_ids)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        stream = body.get("stream", False)
        req = Req(
            body["rid"],
            body["input_ids"],
            {"max_new_tokens": 128, **body["sampling_params"]},
            body.get("cache_salt"),
            body.get("return_sampling_mask", False),
            body.get("logprob_start_len", -1),
            routed=body.get("return_routed_experts", False),
        )
        if not stream:
            req.params["stream_interval"] = 1 << 30
        if len(req.input_ids) + req.params["max_new_tokens"] > self.args.context_length:
            return await self._error(request, stream, "Requested token count exceeds the model's context length")
        async with self.paused:
            await self.paused.wait_for(lambda: not self.is_paused)
        refusal = self.scheduler.refusal(req)
        self.outputs[req.rid] = asyncio.Queue()
        try:
            if refusal is not None:
                req.finished = {"type": "abort", "message": refusal, "status_code": 400}
                self._tell(req)
            else:
                self._order(lambda: self.scheduler.waiting.append(req))
            return await (self._stream(request, req) if stream else self._whole(req))
        finally:
            del self.outputs[req.rid]
            if req.finished is None:
                self._order(lambda: self.scheduler.abort(req.rid))

    async def _stream(self, request: web.Request, req: Req) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            message = await self.outputs[req.rid].get()
            await response.write(b"data: " + json.dumps(message).encode() + b"\n\n")
            if message["meta_info"]["finish_reason"] is not None:
                await response.write(b"data: [DONE]\n\n")
                return response

    async def _whole(self, req: Req) -> web.Response:
        while True:
            message = await self.outputs[req.rid].get()
            if message["meta_info"]["finish_reason"] is not None:
                return web.json_response(message)

    async def _error(self, request: web.Request, stream: bool, text: str) -> web.StreamResponse:
        if not stream:
            return web.json_response({"error": {"message": text}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: " + json.dumps({"error": {"message": text}}).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    async def abort_request(self, request: web.Request) -> web.Response:
        prefix = (await request.json())["rid"]

        def abort() -> None:
            for req in self.scheduler.abort(prefix):
                self._tell(req)

        self._order(abort)
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        mode = (await request.json())["mode"]
        async with self.paused:
            self.is_paused = True
        self._order(lambda: self.scheduler.pause(mode))
        return web.json_response({"status": "ok", "message": "Generation paused successfully."})

    async def continue_generation(self, request: web.Request) -> web.Response:
        async with self.paused:
            self.is_paused = False
            self._order(self.scheduler.go_on)
            self.paused.notify_all()
        return web.json_response({"status": "ok", "message": "Generation continued successfully."})

    async def flush_cache(self, request: web.Request) -> web.Response:
        patient = float(request.query.get("timeout", 0)) > 0
        done = await self._order(lambda: not (patient and self.scheduler.waiting) and self.scheduler.flush())
        return web.Response(text="Cache flushed." if done else "Flush cache failed.", status=200 if done else 400)

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        version = body.get("weight_version")
        success, message = await self._order(
            lambda: self.scheduler.update(body["model_path"], version, body.get("flush_cache", True))
        )
        if success and version is not None:
            self.version = version
        return web.json_response({"success": success, "message": message}, status=200 if success else 400)

    async def weights_checker(self, request: web.Request) -> web.Response:
        action = (await request.json())["action"]
        answer = {"success": True, "message": "Success."}
        if action == "checksum":
            checksums = await self._order(self.scheduler.checksums)
            whole = hashlib.sha256(json.dumps(checksums, sort_keys=True).encode()).hexdigest()
            answer |= {"ranks": [{"checksums": checksums, "per_gpu_checksum": whole}], "per_engine_checksum": whole}
        elif action == "reset_tensors":
            await self._order(self.scheduler.reset)
        else:
            return web.json_response({"success": False, "message": f"Unsupported action={action!r}"}, status=400)
        return web.json_response(answer)

    async def get_weights_by_name(self, request: web.Request) -> web.Response:
        body = await request.json()
        values = await self._order(lambda: self.scheduler.weights_by_name(body["name"], body["truncate_size"]))
        if values is None:
            return web.json_response({"error": {"message": "Get parameter by name failed"}}, status=400)
        return web.json_response(values)

    async def release_memory_occupation(self, request: web.Request) -> web.Response:
        await self._order(self.scheduler.release)
        return web.json_response(None)

    async def resume_memory_occupation(self, request: web.Request) -> web.Response:
        await self._order(self.scheduler.take_back)
        return web.json_response(None)

    async def health(self, request: web.Request) -> web.Response:
        warm, self.warm = self.warm, True
        return web.Response(status=200 if warm else 503)

    async def model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.args.model_path, "weight_version": self.version})

    async def server_info(self, request: web.Request) -> web.Response:
        state = await self._order(lambda: {"running": len(self.scheduler.running), "released": self.scheduler.released})
        return web.json_response({"version": "0.5.23", "internal_states": [state]})

    async def loads(self, request: web.Request) -> web.Response:
        """A snapshot of the last step: no order to the scheduler, which a pause would not hold up either."""
        scheduler = self.scheduler
        used = sum(len(req.input_ids) + len(req.output_ids) for req in scheduler.running)
        load = {
            "num_running_reqs": len(scheduler.running),
            "num_waiting_reqs": len(scheduler.waiting),
            "token_usage": used / (self.args.max_running_requests * self.args.context_length),
        }
        return web.json_response({"loads": [load]})
