"""A worker process seen from inside: questions come in as lines of JSON, answers go out the same way.

A question names a page, `preview` or `verdict`, and the inputs; `bytes` says how many bytes of a file follow the line.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from typing import Any, BinaryIO

import torch

from avow.lab.page import Page, all_pages, error_body_of, json_bytes
from avow.lab.uploads import tensors_of


def answer_of(pages: dict[str, Page], question: dict[str, Any], tensors: dict[str, torch.Tensor]) -> bytes:
    """What a page says as JSON, or the four parts of its mistake; where the page still has something to say, both."""
    try:
        page = pages[question["page"]]
        function = page.preview if question["what"] == "preview" else page.verdict
        assert function is not None, f"{page.name} has no {question['what']}"
        inputs = page.inputs.of(question["inputs"])
        answer = function(inputs, tensors) if page.takes_files else function(inputs)
        trouble = answer.pop("trouble", None)
        return json_bytes((error_body_of(trouble) if trouble else {}) | {"answer": answer})
    except Exception as error:
        return json_bytes(error_body_of(error))


def serve(package: str, questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until nobody is left to ask; the last file is kept for the next questions."""
    waiting: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
    tensors: dict[str, torch.Tensor] = {}

    def tell(said: bytes) -> None:
        answers.write(said + b"\n")
        answers.flush()

    threading.Thread(target=_read, args=(questions, waiting), daemon=True).start()
    pages = all_pages(package)
    tell(json_bytes({"ready": True}))
    while True:
        question, content = waiting.get()
        if content:
            tensors = tensors_of(content)
        tell(answer_of(pages, question, tensors if question["file"] else {}))


def _read(questions: BinaryIO, waiting: queue.Queue[tuple[dict[str, Any], bytes]]) -> None:
    """Pass questions on; when nobody is left to send any, end, whatever is being computed."""
    for line in questions:
        question = json.loads(line)
        waiting.put((question, questions.read(question["bytes"] or 0)))
    os._exit(0)


if __name__ == "__main__":
    # Ctrl-C reaches the whole group: the server ends its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    # What a computation prints must not mix with the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.argv[1], sys.stdin.buffer, answers)
