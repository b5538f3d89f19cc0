"""A scoring service for the verifier `scoring_service`: PickScore, or any other CLIP model of transformers.

    python examples/scoring_service.py --model yuvalkirstain/PickScore_v1 --device cuda --port 8765

A score is the model's scaled cosine between picture and prompt. To host another model, replace `ClipScorer`: a call
gets prompts and pictures, and returns one number, or one object of numbers, for each.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from PIL import Image
from transformers import AutoModel, AutoProcessor

Scorer = Callable[[Sequence[str], Sequence[Image.Image]], list[float]]


class ClipScorer:
    """A CLIP model, called by one thread at a time."""

    def __init__(self, model: str, processor: str | None, device: str, dtype: str) -> None:
        """Load a model, and its processor from the same place unless another one is named."""
        self._model = AutoModel.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
        self._processor = AutoProcessor.from_pretrained(processor or model)
        self._lock = threading.Lock()

    @torch.inference_mode()
    def __call__(self, prompts: Sequence[str], images: Sequence[Image.Image]) -> list[float]:
        """Return the score of each picture for its prompt."""
        inputs = self._processor(
            text=list(prompts), images=list(images), return_tensors="pt", padding=True, truncation=True
        ).to(self._model.device, self._model.dtype)
        with self._lock:
            found = self._model(**inputs)
            cosines = (found.image_embeds.float() * found.text_embeds.float()).sum(-1)
            scores: list[float] = (cosines * self._model.logit_scale.float().exp()).tolist()
        return scores


def decoded(request: Any) -> tuple[list[str], list[Image.Image]]:
    """Return prompts and pictures of a request. Raises `ValueError` if it is no such request."""
    try:
        prompts, encoded = request["prompts"], request["images"]
        if len(prompts) != len(encoded) or not prompts or not all(isinstance(prompt, str) for prompt in prompts):
            raise ValueError("there must be as many `prompts` (texts) as `images`, at least one")
        images = [Image.open(io.BytesIO(base64.b64decode(each, validate=True))).convert("RGB") for each in encoded]
    except (KeyError, TypeError, OSError, Image.DecompressionBombError) as cause:
        raise ValueError(f"{type(cause).__name__}: {cause}") from cause
    return prompts, images


def make_server(scorer: Scorer, host: str, port: int) -> ThreadingHTTPServer:
    """Return a server that scores what is posted to it; `serve_forever` runs it."""

    class Handler(BaseHTTPRequestHandler):
        """Answer 200 with scores, 400 for a request that cannot be read, and 500 if the model fails."""

        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Score the pictures of a request."""
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            try:
                prompts, images = decoded(json.loads(body))
            except ValueError as cause:
                return self._answer(400, {"error": str(cause)})
            try:
                self._answer(200, {"scores": scorer(prompts, images)})
            except RuntimeError as cause:  # such as too little memory
                self._answer(500, {"error": str(cause)})

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            text = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

    return ThreadingHTTPServer((host, port), Handler)


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder or hub name of a CLIP model")
    parser.add_argument("--processor", help="folder or hub name of its processor, if that is elsewhere")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8765)
    options = parser.parse_args()
    scorer = ClipScorer(options.model, options.processor, options.device, options.dtype)
    server = make_server(scorer, options.host, options.port)
    print(f"scoring at http://{options.host}:{server.server_port}/score", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
