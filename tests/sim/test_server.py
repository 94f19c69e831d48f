"""The HTTP surface over real sockets: what a client, a router and a scraper see of vLLM."""

import asyncio
from typing import Any

import pytest
from tests.sim.engines import engine

CHAT = "/v1/chat/completions"
QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "How far is the moon?"}]
HELLO: dict[str, Any] = {"model": "m", "messages": QUESTION, "ignore_eos": True}


async def test_chat_answers_and_counts() -> None:
    """A chat has vLLM's shape, as many tokens as asked for, and says what was cached."""
    async with engine() as client:
        _, first = await client.post(CHAT, HELLO | {"max_tokens": 40}, x_request_id="abc")
        _, second = await client.post(CHAT, HELLO | {"max_completion_tokens": 3})

    choice = first["choices"][0]
    assert (first["id"], first["object"], first["model"]) == ("chatcmpl-abc", "chat.completion", "m")
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")
    assert len(choice["message"]["content"].split()) > 5
    prompt = first["usage"]["prompt_tokens"]
    assert first["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 40,
        "total_tokens": prompt + 40,
        "prompt_tokens_details": {
            "cached_tokens": 0,
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert (cached, second["usage"]["completion_tokens"]) == ((prompt - 1) // 16 * 16, 3)


async def test_stream_is_the_same_text_in_pieces() -> None:
    """Role first, then a chunk a token, the reason with the last, usage when asked for, [DONE]."""
    seeded = HELLO | {"max_tokens": 30, "seed": 5}
    async with engine() as client:
        _, whole = await client.post(CHAT, seeded)
        chunks = await client.stream(CHAT, seeded | {"stream_options": {"include_usage": True}})
        plain = await client.stream("/v1/completions", {"model": "m", "prompt": "The", "max_tokens": 3})

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta["content"] for delta in deltas) == whole["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(deltas) - 1) + [
        "length"
    ]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 30
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert [(chunk["object"], chunk["choices"][0]["index"]) for chunk in plain] == [
        ("text_completion", 0)
    ] * 3


async def test_stream_interval() -> None:
    """--stream-interval N joins N tokens to a chunk; the first comes at once."""
    async with engine("--stream-interval", "5") as client:
        chunks = await client.stream(CHAT, HELLO | {"max_tokens": 20})

    assert len(chunks) == 1 + 1 + 4


async def test_next_turn_hits_the_answer() -> None:
    """Generated text is canonical: sent back as history, it is found in the cache, up to the last block."""
    async with engine() as client:
        _, first = await client.post(CHAT, HELLO | {"max_tokens": 100})
        said = first["choices"][0]["message"]["content"]
        history = [
            *HELLO["messages"],
            {"role": "assistant", "content": said},
            {"role": "user", "content": "Why?"},
        ]
        _, second = await client.post(CHAT, HELLO | {"messages": history, "max_tokens": 1})

    held = first["usage"]["total_tokens"] - 1  # the last token was drawn but never computed
    assert held - 16 - 5 <= second["usage"]["prompt_tokens_details"]["cached_tokens"] <= held


async def test_completion_prompts_of_every_kind() -> None:
    """A text, several texts, token ids and lists of them; one choice each."""
    async with engine() as client:
        _, tokens = await client.post("/tokenize", {"prompt": "Rivers change their beds slowly."})
        ids = tokens["tokens"]
        answers = [
            await client.complete(prompt)
            for prompt in ("Rivers change their beds slowly.", ["a", "b"], ids, [ids, [1, 2]])
        ]

    assert [len(answer["choices"]) for answer in answers] == [1, 2, 1, 2]
    assert answers[0]["usage"]["prompt_tokens"] == answers[2]["usage"]["prompt_tokens"] == len(ids)
    assert answers[3]["usage"]["completion_tokens"] == 8


async def test_tokenize_and_back() -> None:
    """/tokenize renders chats and counts, /detokenize gives the text back."""
    async with engine("--max-model-len", "2048") as client:
        _, chat = await client.post("/tokenize", {"messages": QUESTION})
        _, text = await client.post("/detokenize", {"tokens": chat["tokens"]})
        _, strings = await client.post("/tokenize", {"prompt": "The moon", "return_token_strs": True})
        status, _ = await client.post("/detokenize", {"tokens": [10**9]})

    assert text == {"prompt": "<|im_start|>user\nHow far is the moon?<|im_end|>\n<|im_start|>assistant\n"}
    assert (chat["count"], chat["max_model_len"]) == (len(chat["tokens"]), 2048)
    assert "".join(strings["token_strs"]) == "The moon"
    assert status == 400


async def test_stop_text_ends_the_answer() -> None:
    """A stop text is not shown, also not its beginning, and the finish reason is stop."""
    seeded = HELLO | {"max_tokens": 60, "seed": 1}
    async with engine() as client:
        _, whole = await client.post(CHAT, seeded)
        text = whole["choices"][0]["message"]["content"]
        stop = text[40:47]
        _, cut = await client.post(CHAT, seeded | {"stop": stop})
        chunks = await client.stream(CHAT, seeded | {"stop": [stop, "never"]})

    expected = text[: text.index(stop)]
    assert (cut["choices"][0]["message"]["content"], cut["choices"][0]["finish_reason"]) == (expected, "stop")
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_model_ends_by_itself() -> None:
    """Without ignore_eos an answer ends where the model would, at least min_tokens later."""
    async with engine("--sim-mean-output-tokens", "3") as client:
        body = {"model": "m", "prompt": "The", "max_tokens": 500, "ignore_eos": False}
        answers = [(await client.post("/v1/completions", body))[1] for _ in range(5)]
        floor = (await client.post("/v1/completions", body | {"min_tokens": 50}))[1]

    assert {answer["choices"][0]["finish_reason"] for answer in answers} == {"stop"}
    assert floor["usage"]["completion_tokens"] >= 50


ERRORS: dict[str, tuple[str, Any, int, str]] = {
    "unknown model": (
        "/v1/completions",
        {"model": "x", "prompt": "a"},
        404,
        "The model `x` does not exist. Valid",
    ),
    "no JSON": (CHAT, b"{", 400, "error parsing the body"),
    "wrong type": (CHAT, {"model": "m", "messages": [], "max_tokens": "x"}, 400, "Expected `int"),
    "too long": (
        "/v1/completions",
        {"model": "m", "prompt": "moon " * 200},
        400,
        "maximum context length is 64",
    ),
    "nothing": ("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 0}, 400, "at least 1"),
    "empty": ("/v1/completions", {"model": "m", "prompt": ""}, 400, "Either prompt or prompt_embeds"),
    "n": (CHAT, HELLO | {"n": 2}, 400, "n must be 1"),
    "no prompt": ("/v1/completions", {"model": "m"}, 400, "Either prompt or prompt_embeds"),
    "stream options": (CHAT, HELLO | {"stream_options": {}}, 400, "`stream=True`"),
    "empty salt": (CHAT, HELLO | {"cache_salt": ""}, 400, "cache_salt"),
    "bad id": ("/v1/completions", {"model": "m", "prompt": [10**6]}, 400, "out of vocabulary"),
}


async def test_errors_are_vllms() -> None:
    """Each refusal has its status and vLLM's error object, and the engine goes on."""
    async with engine("--max-model-len", "64") as client:
        found = {name: await client.post(path, body) for name, (path, body, _, _) in ERRORS.items()}
        route = await client.post("/v1/nothing", {})
        limited = await client.complete("a", 100)
        alive = await client.get("/health")

    assert route == (404, {"detail": "Not Found"})
    assert limited["usage"]["total_tokens"] == 64
    assert {name: answer[0] for name, answer in found.items()} == {
        name: one[2] for name, one in ERRORS.items()
    }
    assert [
        name for name, answer in found.items() if ERRORS[name][3] not in answer[1]["error"]["message"]
    ] == []
    assert [answer[1]["error"]["code"] for answer in found.values()] == [one[2] for one in ERRORS.values()]
    assert found["unknown model"][1]["error"] == {
        "message": "The model `x` does not exist. Valid aliases: m.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    assert alive == (200, "")


async def test_small_pages() -> None:
    """/health, /ping, /version, /load and /v1/models are there before the first request."""
    async with engine(
        "--served-model-name", "m", "n", "--enable-lora", "--lora-modules", "ad=/p/ad"
    ) as client:
        pages = [(await client.get(path))[1] for path in ("/health", "/ping", "/version", "/load")]
        _, models = await client.get("/v1/models")

    assert pages == ["", "", {"version": "0.33.0"}, {"server_load": 0}]
    assert [(card["id"], card["root"], card["parent"]) for card in models["data"]] == [
        *(("m", "m", None), ("n", "m", None)),
        ("ad", "/p/ad", "m"),
    ]
    assert [card["max_model_len"] for card in models["data"]] == [40_960, 40_960, None]


async def test_metrics_are_vllms() -> None:
    """Counters, gauges and histograms have vLLM's names, labels and values after a few requests."""
    async with engine("--num-gpu-blocks-override", "101") as client:
        answers = [await client.complete("Rivers change their beds slowly. " * 3, 5) for _ in range(2)]
        found = await client.metrics()
        page = str((await client.get("/metrics"))[1])

    prompt = answers[0]["usage"]["prompt_tokens"]
    hit = answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    at = '{engine="0",model_name="m"}'
    assert hit == (prompt - 1) // 16 * 16
    assert {
        f"vllm:num_requests_running{at}": 0.0,
        f"vllm:num_requests_waiting{at}": 0.0,
        f"vllm:kv_cache_usage_perc{at}": 0.0,
        f"vllm:prefix_cache_queries_total{at}": 2.0 * prompt,
        f"vllm:prefix_cache_hits_total{at}": float(hit),
        f"vllm:prompt_tokens_total{at}": 2.0 * prompt,
        f"vllm:generation_tokens_total{at}": 10.0,
        f"vllm:num_preemptions_total{at}": 0.0,
        f"vllm:time_to_first_token_seconds_count{at}": 2.0,
        f"vllm:inter_token_latency_seconds_count{at}": 8.0,
        f"vllm:e2e_request_latency_seconds_count{at}": 2.0,
        f"vllm:request_queue_time_seconds_count{at}": 2.0,
        f"vllm:request_prefill_time_seconds_count{at}": 2.0,
        f"vllm:request_decode_time_seconds_count{at}": 2.0,
        f"vllm:request_inference_time_seconds_count{at}": 2.0,
        f"vllm:request_prefill_kv_computed_tokens_sum{at}": 2.0 * prompt - hit,
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"}': 2.0 * prompt
        - hit,
        'vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"}': float(hit),
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"}': 2.0,
        'vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"}': 0.0,
    }.items() <= found.items()
    info = next(line for line in page.splitlines() if line.startswith("vllm:cache_config_info{"))
    assert all(label in info for label in ('block_size="16"', 'num_gpu_blocks="101"', 'engine="0"'))
    assert 'vllm:time_to_first_token_seconds_bucket{engine="0",le="0.06",model_name="m"}' in page
    assert "gpu_cache_usage_perc" not in page


async def test_client_that_leaves_frees_its_blocks() -> None:
    """A broken connection ends the request: its blocks are free again, and it counts as aborted."""
    async with engine("--sim-time-scale", "1") as client:
        rank = client.running.engines[0]
        response = await client.session.post(CHAT, json=HELLO | {"stream": True, "max_tokens": 10_000})
        await response.content.readline()

        assert rank.scheduler.pool.usage > 0

        response.close()
        while rank.requests:
            await asyncio.sleep(0.001)
        found = await client.metrics()

        assert rank.scheduler.pool.usage == 0
        assert found['vllm:request_success_total{engine="0",finished_reason="abort",model_name="m"}'] == 1


async def test_drain_ends_what_runs() -> None:
    """On SIGTERM without --shutdown-timeout running requests end with finish reason abort, well formed."""
    async with engine("--sim-time-scale", "1") as client:
        response = await client.session.post(CHAT, json=HELLO | {"stream": True, "max_tokens": 10_000})
        await response.content.readline()
        await client.running.drain(0.0)
        rest = (await response.read()).decode()

    assert '"finish_reason":"abort"' in rest
    assert rest.endswith("data: [DONE]\n\n")


async def test_drain_with_time_lets_them_finish() -> None:
    """--shutdown-timeout gives running requests the time they need."""
    async with engine("--sim-time-scale", "20") as client:
        response = await client.session.post(CHAT, json=HELLO | {"stream": True, "max_tokens": 50})
        await response.content.readline()
        await client.running.drain(30.0)
        rest = (await response.read()).decode()

    assert '"finish_reason":"length"' in rest


async def test_ranks_by_header() -> None:
    """X-data-parallel-rank picks the rank, whose cache is its own; a rank that is not there is refused."""
    async with engine("--data-parallel-size", "2") as client:
        body = HELLO | {"max_tokens": 1}
        cached = [
            (await client.post(CHAT, body, x_data_parallel_rank=rank))[1]["usage"]["prompt_tokens_details"]
            for rank in ("0", "1", "0", "1")
        ]
        status, _ = await client.post(CHAT, body, x_data_parallel_rank="2")
        found = await client.metrics()

    assert [one["cached_tokens"] for one in cached] == [0, 0, 16, 16]
    assert status == 400
    assert found['vllm:prefix_cache_hits_total{engine="1",model_name="m"}'] == 16


async def test_salt_and_adapter_divide_the_cache() -> None:
    """Another cache_salt or LoRA adapter shares nothing."""
    async with engine("--enable-lora", "--lora-modules", "ad=/p/ad") as client:
        cached = []
        for extra in ({}, {"cache_salt": "s"}, {"model": "ad"}, {}, {"cache_salt": "s"}, {"model": "ad"}):
            answer = await client.complete("Rivers change their beds slowly. " * 3, 1, **extra)
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)

    assert cached == [False, False, False, True, True, True]


async def test_adapters_at_run_time() -> None:
    """With vLLM's environment variable adapters come and go; without it the routes do not exist."""
    new = {"lora_name": "x", "lora_path": "/x"}
    async with engine(VLLM_ALLOW_RUNTIME_LORA_UPDATING="1") as client:
        steps = [
            (await client.post(path, body))[0]
            for path, body in (
                ("/v1/load_lora_adapter", new),
                ("/v1/load_lora_adapter", new),
                ("/v1/completions", {"model": "x", "prompt": "a"}),
                ("/v1/unload_lora_adapter", new),
                ("/v1/unload_lora_adapter", new),
                ("/v1/completions", {"model": "x", "prompt": "a"}),
            )
        ]
    async with engine() as client:
        closed = [
            (await client.post(path, new))[0] for path in ("/v1/load_lora_adapter", "/reset_prefix_cache")
        ]

    assert steps == [200, 400, 200, 200, 404, 404]
    assert closed == [404, 404]


async def test_queue_limit() -> None:
    """--max-num-queued-reqs: more than that waiting is a 503."""
    async with engine("--max-num-queued-reqs", "0") as client:
        status, answer = await client.post(CHAT, HELLO)

    assert (status, answer["error"]["code"]) == (503, 503)


async def test_api_key_and_request_id() -> None:
    """--api-key guards /v1 only; --enable-request-id-headers echoes the id."""
    async with engine("--api-key", "k", "--enable-request-id-headers") as client:
        closed, _ = await client.get("/v1/models")
        health, _ = await client.get("/health")
        given = {"Authorization": "Bearer k", "X-Request-Id": "abc"}
        async with client.session.get("/v1/models", headers=given) as response:
            opened, echoed = response.status, response.headers["X-Request-Id"]
        async with client.session.post(
            CHAT, json=HELLO | {"stream": True, "max_tokens": 1}, headers=given
        ) as one:
            streamed = one.headers["X-Request-Id"]

    assert (closed, health, opened, echoed, streamed) == (401, 200, 200, "abc", "abc")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"\xff", b"[" * 100_000, b'{"model":"m","messages":[{"role":1}]}']
)
async def test_rubbish_is_refused_and_survived(body: bytes) -> None:
    """Bodies that are no chat get a 400 and nothing else happens."""
    async with engine() as client:
        status, answer = await client.post(CHAT, body)
        alive, _ = await client.post(CHAT, HELLO | {"max_tokens": 1})

    assert (status, answer["error"]["code"], alive) == (400, 400, 200)
