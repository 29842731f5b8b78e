"""A server of the OpenAI protocol with a real model, which does with answers what servers do."""

from __future__ import annotations

import json
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from finetune.commands.verify.merged import MergedFolder

SECRET = "sk-not-a-real-key-0123456789"
STALLED, CHUNKED = ("content-length", "1000"), ("transfer-encoding", "chunked")


class Server:
    """A real model; `way` is what is done to its answers, `asked` what came in."""

    def __init__(self, folder: Path, way: str = "") -> None:
        self.model = MergedFolder(folder, torch.device("cpu"), trust_remote_code=False)
        self.given: Any = None  # the answer of way "gives", and the ids of way "vllm ids"
        self.lock = threading.Lock()
        self.start(way)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                outer.asked.append((self.path, None, self.headers.get("authorization")))
                self.give(*outer.get(self.path, self.headers.get("authorization")))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append((self.path, body, self.headers.get("authorization")))
                with outer.lock:
                    answer = outer.post(self.path, body, self.headers.get("authorization"))
                self.give(*answer)

            def give(self, status: int, answer: Any) -> None:
                if outer.way == "no http" and self.path.endswith("completions"):
                    self.wfile.write(b"no http, and your key was " + SECRET.encode() + b"\r\n")
                    return
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                if outer.way in ("chunked", "stalled") and self.path.endswith("completions"):
                    self.send_header(*(CHUNKED if outer.way == "chunked" else STALLED))
                    self.end_headers()
                    self.wfile.write(b"5\r\nabc")
                    outer.released.wait(20 if outer.way == "stalled" else 0)
                    return
                if status == 307:
                    self.send_header("location", "http://127.0.0.1:9/v1/chat/completions")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def start(self, way: str = "") -> Server:
        self.way, self.asked, self.refused, self.released = way, [], None, threading.Event()
        self.draw = random.Random(0)
        return self

    def get(self, path: str, key: str | None) -> tuple[int, Any]:
        if path == "/v1/models" and self.way == "lists":
            return 200, {"data": self.given}
        if path == "/v1/models" and self.way == "locked list":
            return 401, {"error": {"message": f"bad key {key}"}}
        if path == "/props" and self.way == "echoes":
            facts = {"ftype": SECRET + "x" * 10_000, "build_info": f"of {SECRET}\ud800"}
            return 200, {"default_generation_settings": {}, **facts}
        if path == "/v1/models":
            return 200, {"data": [{"id": "m"}]}
        if path == "/version" and self.way in ("vllm", "vllm ids"):
            return 200, {"version": "0.20.0"}
        return 404, {"error": {"message": "no such path"}}

    def post(self, path: str, body: dict[str, Any], key: str | None) -> tuple[int, Any]:
        if self.way == "gives" and path.endswith("chat/completions"):
            return 200, self.given
        if self.way == "stalled" and path.endswith("chat/completions"):
            return 500, {}
        if self.way == "no logprobs" and body.get("logprobs"):
            return 501, {"error": {"message": "not supported"}}
        if self.way == "bad key" and path.endswith("chat/completions"):
            return 401, {"error": {"message": f"bad key {key}"}}
        if self.way in ("no system", "refuses all") and path.endswith("chat/completions"):
            self.refused = self.refused or body["messages"]
            if self.way == "refuses all" or body["messages"] == self.refused:
                return 400, {"error": {"message": f"System role not supported {key}"}}
        if self.way.isdigit() and path.endswith("chat/completions"):
            return int(self.way), {"error": {"message": f"no {key}"}}
        if self.way == "vllm ids" and path == "/tokenize":
            return 200, {"tokens": self.given}
        if self.way == "echoes" and path == "/apply-template":
            return 200, {"prompt": f"{key} \ud800"}
        if self.way == "echoes" and path == "/tokenize":
            return 200, {"tokens": [1, 2]}
        if self.way == "redirects" and path.endswith("completions"):
            return 307, {}
        if path == "/tokenize" and self.way == "vllm":
            text = self.model.tokenizer.apply_chat_template(
                body["messages"], tokenize=False, add_generation_prompt=True
            )
            ids = self.model.tokenizer(text, add_special_tokens=False)["input_ids"]
            return 200, {"tokens": ids}
        if path != "/v1/chat/completions":
            return 404, {"error": {"message": "no such path"}}
        assert body["temperature"] == 0
        response = self.model.chat(body["messages"], body["max_tokens"])
        text, finish, tokens = response.answer, response.finish, response.answer_tokens
        if self.way == "echoes":
            text, finish = f"{key} \ud800 {text}", f"stop {key}" * 100
        if self.way == "stops":
            text, finish = text[: len(text) // 2], "stop"
        if self.way == "draws":
            words = text.split(" ")
            self.draw.shuffle(words)
            text = " ".join(words)
        usage = {"prompt_tokens": response.prompt_tokens, "completion_tokens": tokens}
        message = {"content": text}
        if self.way == "reasons":
            message = {"content": None, "reasoning_content": text}
        choice = {"message": message, "finish_reason": finish}
        if self.way == "vllm" and body.get("logprobs"):
            content = [{"token": "", "logprob": number} for number in response.logprobs]
            choice["logprobs"] = {"content": content}
        return 200, {"choices": [choice], "usage": usage}
