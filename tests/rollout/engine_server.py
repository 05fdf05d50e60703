"""A server with vLLM's HTTP interface on loopback, which samples with transformers, peft and torch: none of our code.

It serves one model at a time, from the folder that it was told to load, and adapters over it.
"""

from __future__ import annotations

import json
import threading
import warnings
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

logging.disable_progress_bar()  # of loaded weights
torch.set_num_threads(1)  # of models as small as these


class Engine:
    """State of the server, and what it was asked.

    ``broken``: called with the path and the answer before an answer goes out; returns (status, answer).
    """

    def __init__(self, max_model_len=4096):
        self.model, self.adapters, self.max_model_len = None, {}, max_model_len
        self.asked, self.lock = [], threading.Lock()
        self.broken = lambda path, answer: (200, answer)
        self.url = ""

    def answer(self, path, body):
        with self.lock:
            self.asked.append((path, body))
            if path == "/v1/models":
                return {"data": [{"id": "served", "max_model_len": self.max_model_len}]}
            if path == "/collective_rpc":
                assert body["method"] == "reload_weights"
                self.model = load(body["kwargs"]["weights_path"])
                return {"results": [None]}
            if path == "/v1/load_lora_adapter":
                self.adapters[body["lora_name"]] = adapted(self.asked, body["lora_path"])
                return "Success"
            return {"choices": self.choices(body)} if path == "/v1/completions" else None

    @torch.no_grad()
    def choices(self, body):
        model = self.model if body["model"] == "served" else self.adapters[body["model"]]
        drawn = torch.Generator().manual_seed(body["seed"])
        ids = torch.tensor([body["prompt"]] * body["n"])
        chosen, logprobs = [[] for _ in ids], [[] for _ in ids]
        for _ in range(body["max_tokens"]):
            logits = model(ids).logits[:, -1].double()
            if body["top_k"]:
                logits[logits < logits.topk(body["top_k"]).values[:, -1:]] = -torch.inf
            if body["temperature"]:
                logp = torch.log_softmax(logits / body["temperature"], -1)
                new = torch.multinomial(logp.exp(), 1, generator=drawn)
            else:
                new = logits.argmax(-1, keepdim=True)
                logp = torch.zeros_like(logits)
            for i, token in enumerate(new[:, 0].tolist()):
                if not chosen[i] or chosen[i][-1] not in body["stop_token_ids"]:
                    chosen[i].append(token)
                    logprobs[i].append(float(logp[i, token]))
            ids = torch.cat([ids, new], 1)
        return [
            {"index": i, "token_ids": c, "logprobs": {"token_logprobs": p}, "finish_reason": "stop"}
            for i, (c, p) in enumerate(zip(chosen, logprobs))
        ]


def load(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def adapted(asked, folder):
    """An adapter over the backbone that was loaded last, which peft changes in place: a copy of its own."""
    from peft import PeftModel

    base = next(body["kwargs"]["weights_path"] for path, body in reversed(asked) if path == "/collective_rpc")
    warnings.simplefilter("ignore")  # peft names what transformers will remove; this is in a thread of the server
    return PeftModel.from_pretrained(load(base), folder).eval()


@contextmanager
def running(**settings):
    """An `Engine` that answers at its ``url`` until the block ends."""
    engine = Engine(**settings)

    class Handler(BaseHTTPRequestHandler):
        def reply(self, body):
            try:
                status, answer = engine.broken(self.path, engine.answer(self.path, body))
            except Exception as error:
                status, answer = 500, {"error": {"message": f"{type(error).__name__}: {error}"}}
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self):
            self.reply(None)

        def do_POST(self):
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    engine.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield engine
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
