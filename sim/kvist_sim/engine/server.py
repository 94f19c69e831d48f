"""HTTP interface of vLLM (``vllm/entrypoints``) over the simulated engines: routes, headers, status codes."""

import time
from collections.abc import Awaitable, Callable, Mapping
from collections.abc import Sequence as Seq
from functools import partial
from typing import Any, Final, TypeAlias
from uuid import uuid4

import msgspec
from aiohttp import web

from kvist_epp import names
from kvist_epp.errors import BadRequest
from kvist_epp.prompt.request import Kind, parse
from kvist_sim.engine import openai
from kvist_sim.engine.args import Settings
from kvist_sim.engine.loop import Engine
from kvist_sim.engine.metrics import Metrics
from kvist_sim.engine.offload import allowed_media
from kvist_sim.engine.openai import ApiError
from kvist_sim.engine.sequence import Sequence
from kvist_sim.engine.sinks import (
    Answer,
    Stream,
    Whole,
    answer,
    body_of,
    document_of,
    refusal,
    request_id,
    signed,
    writer,
)
from kvist_sim.engine.tokenizer import Prompts, Writer, output_length

BODY_BYTES: Final = 1 << 30
"""vLLM has no limit of its own; this one only guards the machine."""

Handler: TypeAlias = Callable[[web.Request], Awaitable[web.StreamResponse]]
Counts: TypeAlias = Callable[[Seq[Sequence]], dict[str, Any]]


class Server:
    """Application: serves the model names and turns requests into sequences."""

    def __init__(
        self,
        settings: Settings,
        engines: Mapping[int, Engine],
        prompts: Prompts,
        writer: Writer,
        metrics: Metrics,
        *,
        longest: int,
        sources: Mapping[str, Any],
        now: Callable[[], float],
    ) -> None:
        """Use ``longest`` as the context length; ``sources`` as the answer of /kv_event_sources."""
        self._settings = settings
        self._engines = engines
        self._prompts = prompts
        self._writer = writer
        self._metrics = metrics
        self._longest = longest
        self._sources = sources
        self._now = now
        self._adapters = dict(settings.lora)
        self._created = int(time.time())
        self._requests = 0
        self._open = 0

    def application(self) -> web.Application:
        """Return the routes of vLLM; those of development mode only when it is on."""
        made = web.Application(client_max_size=BODY_BYTES, middlewares=[self._guard])
        made.on_response_prepare.append(signed)
        made.add_routes(
            [
                web.get("/health", self._health),
                *(web.route(method, "/ping", self._health) for method in ("GET", "POST")),
                web.get("/version", self._version),
                web.get("/load", self._load),
                web.get("/metrics", self._page),
                web.get("/kv_event_sources", self._event_sources),
                web.get("/v1/models", self._models),
                web.post("/v1/chat/completions", partial(self._generate, chat=True)),
                web.post("/v1/completions", partial(self._generate, chat=False)),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
            ]
        )
        if self._settings.dev_mode:
            made.add_routes([web.post("/reset_prefix_cache", self._reset)])
        if self._settings.runtime_lora:
            made.add_routes(
                [
                    web.post("/v1/load_lora_adapter", self._load_adapter),
                    web.post("/v1/unload_lora_adapter", self._unload_adapter),
                ]
            )
        return made

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors as JSON, the API key on /v1, the request id's echo."""
        try:
            self._authorize(request)
            response = await handler(request)
        except ApiError as problem:
            response = refusal(problem)
        except web.HTTPException as problem:
            if problem.status < 400:
                raise
            response = refusal(ApiError(problem.status, problem.reason, openai.ROUTE))
        if self._settings.request_id_headers and not response.prepared:
            response.headers["X-Request-Id"] = request_id(request)
        return response

    def _authorize(self, request: web.Request) -> None:
        keys = self._settings.api_keys
        if keys and request.path.startswith(("/v1", "/v2", "/inference")):
            scheme, _, token = request.headers.get("Authorization", "").partition(" ")
            if scheme.lower() != "bearer" or token not in keys:
                raise ApiError(401, "Unauthorized", "Unauthorized")

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _: web.Request) -> web.Response:
        return answer({"version": self._settings.version})

    async def _load(self, _: web.Request) -> web.Response:
        return answer({"server_load": self._open if self._settings.load_tracking else 0})

    async def _page(self, _: web.Request) -> web.Response:
        return web.Response(body=self._metrics.page(), headers={"Content-Type": "text/plain; version=1.0.0"})

    async def _event_sources(self, _: web.Request) -> web.Response:
        return answer(self._sources)

    async def _models(self, _: web.Request) -> web.Response:
        settings = self._settings
        base = [self._card(name, settings.model, None, self._longest) for name in settings.served]
        adapters = [self._card(name, path, settings.served[0], None) for name, path in self._adapters.items()]
        return answer({"object": "list", "data": base + adapters})

    def _card(self, name: str, root: str, parent: str | None, longest: int | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "vllm",
            "root": root,
            "parent": parent,
            "max_model_len": longest,
            "permission": [],
        }

    def _permission(self) -> dict[str, Any]:
        allowed = ("allow_sampling", "allow_logprobs", "allow_view")
        denied = ("allow_create_engine", "allow_search_indices", "allow_fine_tuning", "is_blocking")
        return {
            "id": f"modelperm-{uuid4().hex[:16]}",
            "object": "model_permission",
            "created": self._created,
            **dict.fromkeys(allowed, True),
            **dict.fromkeys(denied, False),
            "organization": "*",
            "group": None,
        }

    async def _tokenize(self, request: web.Request) -> web.Response:
        raw = await body_of(request)
        document = document_of(raw)
        if "messages" in document:
            document.setdefault("model", self._settings.served[0])
            ids = self._ids("/v1/chat/completions", msgspec.json.encode(document))[0]
        elif isinstance(document.get("prompt"), str):
            document |= {"model": self._settings.served[0]}
            ids = self._ids("/v1/completions", msgspec.json.encode(document))[0]
        else:
            raise ApiError(400, "prompt: Field required", "Bad Request")
        strings = (
            [self._prompts.text([token]) for token in ids] if document.get("return_token_strs") else None
        )
        return answer(
            {"count": len(ids), "max_model_len": self._longest, "tokens": ids, "token_strs": strings}
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        tokens = document_of(await body_of(request)).get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise ApiError(400, "tokens: Input should be a list of token ids", "Bad Request")
        try:
            return answer({"prompt": self._prompts.text(tokens)})
        except BadRequest as problem:
            raise openai.bad(problem) from None

    async def _reset(self, _: web.Request) -> web.Response:
        done = [engine.scheduler.pool.reset() for engine in self._engines.values()]
        return answer({"success": all(done)})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        document = document_of(await body_of(request))
        name, path = document.get("lora_name"), document.get("lora_path")
        if not isinstance(name, str) or not isinstance(path, str) or not name or not path:
            raise ApiError(400, "Both 'lora_name' and 'lora_path' must be provided.", "InvalidUserInput")
        if name in self._adapters and not document.get("load_inplace"):
            raise ApiError(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        self._adapters[name] = path
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        name = document_of(await body_of(request)).get("lora_name")
        if name not in self._adapters:
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", "NotFoundError")
        del self._adapters[name]
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _generate(self, request: web.Request, *, chat: bool) -> web.StreamResponse:
        raw = await body_of(request)
        body = openai.read(raw)
        model = body.model or self._settings.served[0]
        if model not in self._settings.served and model not in self._adapters:
            raise openai.not_found(model, self._settings.served)
        engine = self._engine(request)
        prompts = self._ids("/v1/chat/completions" if chat else "/v1/completions", _named(raw, body, model))
        self._check_queue(engine, len(prompts))
        identity = f"{'chatcmpl' if chat else 'cmpl'}-{request_id(request)}"
        sequences = [
            self._sequence(request, body, model, ids, f"{identity}-{number}", chat=chat)
            for number, ids in enumerate(prompts)
        ]
        answers = {one: Answer(self._prompts.stream(), body.stops) for one in sequences}
        self._open += 1
        try:
            if body.stream:
                return await self._streamed(
                    request, engine, body, answers, chat=chat, id=identity, model=model
                )
            return await self._whole(engine, body, answers, chat=chat, id=identity, model=model)
        finally:
            self._open -= 1
            for sequence in sequences:
                engine.end(sequence)

    def _engine(self, request: web.Request) -> Engine:
        """Return the rank that the client names, else the one with the fewest requests."""
        asked = request.headers.get(names.DATA_PARALLEL_RANK_HEADER)
        if asked is None or not asked.isdigit():
            return min(self._engines.values(), key=lambda engine: engine.requests)
        if int(asked) not in self._engines:
            raise ApiError(
                400,
                f"data_parallel_rank {asked} is out of range [0, {len(self._engines)}).",
                "BadRequestError",
            )
        return self._engines[int(asked)]

    def _ids(self, path: str, raw: bytes) -> list[list[int]]:
        try:
            request = parse(path, raw)
            if request.kind is Kind.COMPLETION and request.why == "shape":
                raise openai.no_prompt()
            return self._prompts.ids(request)
        except BadRequest as problem:
            raise openai.bad(problem) from None

    def _check_queue(self, engine: Engine, more: int) -> None:
        limit = self._settings.max_queued_requests
        if limit is not None and len(engine.scheduler.waiting) + more > limit:
            self._metrics.rejected("max_num_queued_reqs")
            raise ApiError(503, "The request queue is full.", "ServiceUnavailableError")

    def _sequence(
        self,
        request: web.Request,
        body: openai.Body,
        model: str,
        ids: list[int],
        identity: str,
        *,
        chat: bool,
    ) -> Sequence:
        if not ids:
            raise openai.no_prompt()
        limit = openai.output_limit(body, chat=chat, prompt=len(ids), longest=self._longest)
        self._requests += 1
        again = f"{body.seed}" if body.seed is not None or body.temperature == 0 else f"{self._requests}"
        seed = f"{self._settings.seed}/{hash(tuple(ids))}/{again}"
        length = (
            None
            if body.ignore_eos
            else output_length(seed, self._settings.mean_output_tokens, body.min_tokens)
        )
        return Sequence(
            id=identity,
            prompt=ids,
            output=self._writer.tokens(seed, length, leading_space=not chat),
            max_tokens=limit,
            arrived=self._now(),
            adapter=(model, self._adapters[model]) if model in self._adapters else None,
            salt=body.cache_salt,
            session=request.headers.get(names.SESSION_HEADER) or body.session,
            report_hits=body.reports_hits,
            eos=self._prompts.end,
            load_tiers=allowed_media(body.kv_transfer_params),
        )

    async def _whole(
        self, engine: Engine, body: openai.Body, answers: Mapping[Sequence, Answer], **named: Any
    ) -> web.Response:
        sink = Whole(answers, engine.end)
        for sequence in answers:
            engine.submit(sequence, sink)
        await sink.done
        said = [
            (answer.text, answer.finish or "stop", _output(one) if body.return_token_ids else None)
            for one, answer in answers.items()
        ]
        made = openai.whole(
            answers=said, created=int(time.time()), counts=self._counts(list(answers)), **named
        )
        return web.Response(body=made, content_type="application/json")

    async def _streamed(
        self,
        request: web.Request,
        engine: Engine,
        body: openai.Body,
        answers: Mapping[Sequence, Answer],
        *,
        chat: bool,
        id: str,  # noqa: A002 - the field's own name
        model: str,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        if self._settings.request_id_headers:
            response.headers["X-Request-Id"] = request_id(request)
        await response.prepare(request)
        sink = Stream(
            answers,
            engine.end,
            chunks=openai.Chunks(chat=chat, id=id, created=int(time.time()), model=model),
            write=writer(request),
            interval=self._settings.stream_interval,
            token_ids=bool(body.return_token_ids),
            counts=self._counts if self._wants_usage(body) else None,
        )
        for sequence in answers:
            engine.submit(sequence, sink)
        await sink.done
        await response.write_eof()
        return response

    def _wants_usage(self, body: openai.Body) -> bool:
        asked = body.stream_options is not None and bool(body.stream_options.include_usage)
        return asked or self._settings.force_usage

    def _counts(self, sequences: Seq[Sequence]) -> dict[str, Any]:
        """vLLM reports the cached tokens of the last prompt of a list, not their sum."""
        cached = sequences[-1].cached or 0 if self._settings.prompt_tokens_details else None
        return openai.usage(
            sum(len(one.prompt) for one in sequences), sum(one.generated for one in sequences), cached
        )


def _output(sequence: Sequence) -> list[int]:
    return sequence.tokens[len(sequence.prompt) :]


def _named(raw: bytes, body: openai.Body, model: str) -> bytes:
    """vLLM serves a body without a model with its first one; the picker's reader insists on a name."""
    if body.model:
        return raw
    return msgspec.json.encode(document_of(raw) | {"model": model})
