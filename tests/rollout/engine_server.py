"""A server with the HTTP interfaces of vLLM and SGLang on loopback. It samples with transformers, peft and torch.

It serves one model at a time, from the folder that it was told to load, and adapters over it. It has none of our code.
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
            if path == "/v1/completions":
                return {"choices": self.choices(body)}
            return None if path == "/reset_prefix_cache" else self.sglang(path, body)

    def sglang(self, path, body):
        if path == "/update_weights_from_disk":
            self.model = load(body["model_path"])
            return {"success": True, "message": "done"}
        if path == "/unload_lora_adapter":
            return {"success": self.adapters.pop(body["lora_name"], None) is not None}
        if path == "/load_lora_adapter":
            known = body["lora_name"] in self.adapters  # SGLang takes no second adapter of a name
            if not known:
                self.adapters[body["lora_name"]] = adapted(self.asked, body["lora_path"])
            return {"success": not known, "error_message": "loaded already" if known else ""}
        return [self.generated(*row) for row in zip(body["input_ids"], body["sampling_params"], self.named(body))]

    def named(self, body):
        return body.get("lora_path") or ["served"] * len(body["input_ids"])

    def generated(self, prompt, entry, name):
        form = {"prompt": prompt, "model": name, "n": 1, "top_k": 0, "seed": entry["sampling_seed"]}
        form |= {"max_tokens": entry["max_new_tokens"], "temperature": entry["temperature"]}
        (found,) = self.choices({**form, "stop_token_ids": entry["stop_token_ids"]})
        pairs = zip(found["logprobs"]["token_logprobs"], found["token_ids"])
        pairs = [[-5.0 if entry["temperature"] == 0 else logp, token, None] for logp, token in pairs]
        return {"output_ids": found["token_ids"], "meta_info": {"output_token_logprobs": pairs}}

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

    folders = {"/collective_rpc": lambda body: body["kwargs"]["weights_path"]}
    folders["/update_weights_from_disk"] = lambda body: body["model_path"]
    base = next(folders[path](body) for path, body in reversed(asked) if path in folders)
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
