"""A server that answers as SGLang does, and fails in ways that a real one does not on request."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import pickle
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage
from slime_core.runtime.processes.ports import ReservedPort
from slime_models.transfer.manifest import read_manifest
from slime_sglang.inside.receiving_loader import receive
from slime_sglang.weights.protocol import LOAD, LOADERS, RECEIVE, LoaderRequest, LoaderResult

TOKENS_OF_ANSWER = 3
#: That workers ask for, as SGLang does: everywhere but for their health.
KEY = "the-key-of-the-workers"


def is_no_preface(record: logging.LogRecord) -> bool:
    """Whether a log record is of anything but the preface of HTTP/2, by which sglang-router greets a worker first."""
    error = record.exc_info[1] if record.exc_info else None
    return not (isinstance(error, BadHttpMessage) and "Pause on PRI/Upgrade" in error.message)


_LOG = logging.getLogger("fake_worker")
_LOG.addFilter(is_no_preface)


class TwoTensors(torch.nn.Module):
    """A model that is loaded as SGLang loads them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(torch.zeros(2, 3)), torch.nn.Parameter(torch.zeros(4))
        self.spoils = False

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy them in."""
        for name, tensor in tensors:
            self.get_parameter(name).data.copy_(tensor + self.spoils)


class FakeWorker:
    """One server on loopback. `faults` says how it answers on a path: 500, `torn`, `cut`, `nonsense` or `hang`.

    It continues every sequence by the sum of its first two ids, whose log-prob is minus their place in the sequence.
    """

    def __init__(self, model_path: Path, **info: Any) -> None:
        self.faults: dict[str, int | str] = {}
        self.asked: list[str] = []
        """Paths, in order."""
        self.answered: list[list[int]] = []
        """Prompts that got their answer."""
        self.bodies: list[dict[str, Any]] = []
        """What was sent to `/generate`."""
        self.update_bodies: list[tuple[str, dict[str, Any]]] = []
        """What was sent to the paths of an update, in order."""
        self.faults_within: list[str] = []
        """What comes after the first token of the next streams: as in `faults`, or `end`."""
        self.break_off = asyncio.Event()
        """Those faults wait for it."""
        self.break_off.set()
        self.hold = asyncio.Event()
        """Answers to `/generate` wait for it."""
        self.hold.set()
        self.load = {"token_usage": 0.0, "num_running_reqs": 0, "num_waiting_reqs": 0}
        """What it counts of its requests."""
        self.retracted = 0
        self.version = "initial"
        self.refusal: str | None = None
        """What it finds wrong with updates."""
        self.spoils = False
        """Whether it holds something else than what it loads."""
        self.model = TwoTensors()
        self._info = {
            "model_path": str(model_path),
            "dtype": "float32",
            "custom_weight_loader": list(LOADERS),
            "incremental_streaming_output": True,
            **info,
        }

    async def start(self) -> None:
        """Listen."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1, logger=_LOG)
        await self._runner.setup()
        self._port = ReservedPort()
        await web.TCPSite(self._runner, "127.0.0.1", self._port.number).start()
        self.address = f"127.0.0.1:{self._port.number}"

    async def stop(self) -> None:
        """Close every connection and take no more; nobody else gets the port."""
        await self._runner.cleanup()

    async def close(self) -> None:
        """Stop, and let go of the port."""
        await self.stop()
        self._port.release()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if not path.startswith("/health") and request.headers.get("Authorization") != f"Bearer {KEY}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        self.asked.append(path)
        fault = self.faults.get(path)
        if fault == "hang":
            await asyncio.Event().wait()
        if fault == "cut":
            request.transport.close()
            return web.Response()
        if fault == "torn":
            response = web.StreamResponse(headers={"Content-Length": "100"})
            await response.prepare(request)
            await response.write(b'{"half":')
            request.transport.close()
            return response
        if fault == "nonsense":
            return web.Response(text="<html>")
        if isinstance(fault, int):
            return web.Response(status=fault, text="a fault")
        if path == "/generate":
            return await self._generate(request)
        if path == "/v1/loads":
            return web.json_response({"loads": [self.load]})
        if path == "/metrics":
            return web.Response(text=f'sglang:num_retracted_requests_total{{a="b"}} {self.retracted}.0\n')
        if path in ("/begin_weight_update", "/update_weights_from_tensor"):
            self.update_bodies.append((path, await request.json()))
        if path == "/update_weights_from_tensor":
            await self._load(await request.json())
        if path == "/update_weight_version":
            self.version = (await request.json())["new_version"]
        if path == "/abort_request":
            self.hold.set()
        said = self._info | {"weight_version": self.version}
        return web.json_response(said if path in ("/server_info", "/model_info") else {})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if not body["stream"]:
            await self.hold.wait()
            self.answered.append(body["input_ids"])
            return web.json_response(self._answer(body, 0, body["sampling_params"]["max_new_tokens"]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._send(response, self._answer(body, 0, 1))
        fault = self.faults_within.pop() if self.faults_within else None
        if fault is not None:
            await self.break_off.wait()
        match fault:
            case "torn":
                await response.write(b'data: {"meta_info": {"finish_reason"')
                request.transport.close()
            case "cut":
                request.transport.close()
            case "nonsense":
                await response.write(b"data: <html>\n\n")
            case "hang":
                await asyncio.Event().wait()
            case None:
                await self.hold.wait()
                self.answered.append(body["input_ids"])
                await self._send(response, self._answer(body, 1, body["sampling_params"]["max_new_tokens"]))
                await response.write(b"data: [DONE]\n\n")
        return response

    async def _send(self, response: web.StreamResponse, answer: dict[str, Any]) -> None:
        """Send an event, cut in two."""
        event = b"data: " + json.dumps(answer).encode() + b"\n\n"
        await response.write(event[:20])
        await response.write(event[20:])

    def _answer(self, body: dict[str, Any], start: int, end: int) -> dict[str, Any]:
        """Return the tokens from `start` to before `end` of an answer, of which `end` are there."""
        context = body["input_ids"]
        tokens = [sum(context[:2]) % 100] * (end - start)
        is_whole = end == body["sampling_params"]["max_new_tokens"]
        meta = {
            "finish_reason": {"type": "length"} if is_whole else None,
            "weight_version": self.version,
            "completion_tokens": end,
            "output_token_logprobs": [
                [-float(len(context) + place), token, None] for place, token in enumerate(tokens, start=start)
            ],
        }
        read = (
            {"prompt_token_ids": context} if body.get("return_prompt_token_ids") else {}
        )  # an image is one id
        return {"output_ids": tokens, "meta_info": meta, **read}

    async def _load(self, body: dict[str, Any]) -> None:
        """Hold what lies in the folder, as its manifest says, or what the only rank receives."""
        named_tensors = pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))
        ((text, _),) = named_tensors
        request = LoaderRequest(**json.loads(text))
        if body["load_format"] == RECEIVE:
            self.model.spoils = self.spoils
            await asyncio.to_thread(receive, self.model, named_tensors)
            return
        result = LoaderResult(error=self.refusal)
        if body["load_format"] == LOAD:
            manifest = read_manifest(Path(request.folder))
            self.version = manifest.version
            result = LoaderResult(
                held={entry.name: entry.fingerprint + self.spoils for entry in manifest.entries}
            )
        Path(request.answer).write_text(json.dumps(asdict(result)))
