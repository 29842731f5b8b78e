"""The application behind the guard: routes of the OpenAI protocol, health, metrics and the page."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.exceptions import HTTPException

from finetune.commands.serve.answers import AnswerResponse, Metrics
from finetune.commands.serve.guard import Guard
from finetune.commands.serve.options import ServeOptions
from finetune.commands.serve.protocol import ApiError, ChatRequest, CompletionRequest, parse
from finetune.commands.serve.workers import WorkerPool

STATIC = Path(__file__).parent / "static"
PAGE_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/app.js": ("app.js", "text/javascript; charset=utf-8"),
    "/markdown.js": ("markdown.js", "text/javascript; charset=utf-8"),
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_PHRASES = {
    404: ("there is nothing here", "not_found"),
    405: ("not with this method", "method_not_allowed"),
}


def create_app(
    pool: WorkerPool, options: ServeOptions, token: str | None, metrics: Metrics
) -> Guard:
    # The pages that FastAPI makes of its schema would load scripts from elsewhere.
    app = FastAPI(
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    began = int(time.time())

    # ------------------------------------------------------------ errors

    @app.exception_handler(ApiError)
    async def known(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(HTTPException)
    async def by_the_router(_: Request, error: HTTPException) -> Response:
        message, code = _PHRASES.get(error.status_code, (str(error.detail), None))
        return ApiError(error.status_code, message, code=code, headers=error.headers).response()

    @app.exception_handler(Exception)
    async def unexpected(_: Request, error: Exception) -> Response:
        # uvicorn logs the exception. Its message may contain the prompt: clients do not get it.
        message = "the server failed on this request"
        return ApiError(500, message, kind="server_error", code="internal").response()

    # ------------------------------------------------------------ answers

    def check_model(name: str) -> None:
        if name != pool.about["name"]:
            message = f"the model {name[:100]!r} is not here; /v1/models lists what is"
            raise ApiError(404, message, param="model", code="model_not_found")

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        asked = parse(ChatRequest, await request.body())
        check_model(asked.model)
        return AnswerResponse(
            asked,
            pool=pool,
            options=options,
            metrics=metrics,
        )

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        asked = parse(CompletionRequest, await request.body())
        check_model(asked.model)
        return AnswerResponse(
            asked,
            pool=pool,
            options=options,
            metrics=metrics,
        )

    # ------------------------------------------------------------ the server itself

    def entry() -> dict[str, Any]:
        context_tokens = pool.about["context_tokens"]
        return {
            "id": pool.about["name"],
            "object": "model",
            "created": began,
            "owned_by": "finetune",
            "context_tokens": context_tokens,
            "max_new_tokens": min(options.max_new_tokens, context_tokens),
            "sampling": pool.about["sampling"],
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [entry()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        check_model(name)
        return JSONResponse(entry())

    @app.get("/health")
    async def health() -> Response:
        workers = [
            {
                "number": w.number,
                "state": w.state,
                "active": len(w.running),
                "restarts": w.restarts,
            }
            for w in pool.workers
        ]
        ready = pool.ready_count
        state = "ok" if ready == len(workers) else "degraded" if ready else "unavailable"
        body = {
            "status": state,
            "workers": workers,
            "queued": pool.queued_count,
        }
        return JSONResponse(body, 200 if ready else 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
        text = metrics.text(
            workers_ready=pool.ready_count, active=pool.active_count, queued=pool.queued_count
        )
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    # ------------------------------------------------------------ the page

    for path, (name, content_type) in PAGE_FILES.items():
        app.add_api_route(
            path, _page(name, content_type), methods=["GET", "HEAD"], response_model=None
        )
    return Guard(app, options, token)


def _page(name: str, content_type: str) -> Callable[[], Awaitable[Response]]:
    content = (STATIC / name).read_bytes()

    # Without parameters: FastAPI would read them from the query, so that a link sets the content.
    async def page() -> Response:
        return Response(content, headers={"content-type": content_type})

    return page
