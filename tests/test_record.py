"""A record holds the answers that were given while it was open: of its own thread, and of threads that have none."""

from __future__ import annotations

import contextvars
import math
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TextIteratorStreamer

import avow
from avow.core import Certificate
from avow.core.record import note
from avow.integrations.transformers import enable
from avow.nn import Attention
from tests.helpers.model_folders import long_model
from tests.helpers.tiny_models import WORDS


def certificate(bound: float = 1e-3) -> Certificate:
    return Certificate("exact", {}, "softmax attention", "deterministic", bound, torch.tensor([bound]))


def in_thread(work: Callable[[], Any], name: str = "worker") -> None:
    """Run something in another thread to its end; what it raises is raised here."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name=name)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def test_an_empty_record_keeps_nothing_and_bounds_nothing() -> None:
    with avow.record() as found:
        pass
    assert not found.keeps(1e-9) and not found.keeps(1.0)
    assert found.bound == math.inf
    assert str(found).startswith("no answer was recorded")


def test_a_record_gets_the_answers_of_a_thread_that_has_none() -> None:
    with avow.record() as found:
        note("here", certificate())
        in_thread(lambda: note("there", certificate(2e-3)), "streamer")
    assert [layer for layer, _ in found] == ["here", "there"] and found.bound == 2e-3
    assert found.threads == {"streamer": 1} and "1 answer was given in the thread streamer" in str(found)


def test_streaming_generation_is_recorded_in_full() -> None:
    class Tokens:
        """A tokenizer that writes numbers."""

        def decode(self, ids: Any, **options: Any) -> str:
            return " ".join(map(str, ids)) + "\n"

    model = long_model()
    enable(model, tol=1e-2)
    streamer = TextIteratorStreamer(Tokens())
    asked = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "streamer": streamer}
    with avow.record() as found:
        thread = threading.Thread(
            target=model.generate, args=(torch.randint(3, WORDS, (1, 9)),), kwargs=asked, name="generate"
        )
        thread.start()
        assert "".join(streamer)
        thread.join()
    assert len(found) == 12 * 2 and found.keeps(1e-2)
    assert found.threads == {"generate": 24}


def test_records_of_two_threads_get_their_own_answers_each() -> None:
    both_open, found = threading.Barrier(2), {}

    def work(name: str) -> None:
        with avow.record() as own:
            both_open.wait()
            for _ in range(100):
                note(name, certificate())
            both_open.wait()
        found[name] = own

    threads = [threading.Thread(target=work, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, own in found.items():
        assert {layer for layer, _ in own} == {name} and len(own) == 100
        assert own.keeps(1e-2) and not own.threads and not own.unattributed


def test_an_answer_that_may_be_anybodys_is_in_no_record_and_all_say_so() -> None:
    other: list[Any] = []

    def work() -> None:
        with avow.record() as own:
            note("other", certificate())
            other.append(own)
            in_thread(lambda: note("whose?", certificate()), "third")

    with avow.record() as mine:
        note("mine", certificate())
        in_thread(work)
    for record, layer in ((mine, "mine"), (other[0], "other")):
        assert [name for name, _ in record] == [layer]
        assert record.unattributed == 1 and not record.keeps(1.0)
        assert "not in this record: 1 answer of other threads" in str(record)


def test_a_record_inside_another_shares_its_answers_also_with_a_third_thread() -> None:
    with avow.record() as outer:
        note("first", certificate())
        with avow.record() as inner:
            in_thread(lambda: note("second", certificate()))
        note("third", certificate())
    assert [layer for layer, _ in outer] == ["first", "second", "third"]
    assert [layer for layer, _ in inner] == ["second"]


def test_a_context_that_outlives_a_record_adds_nothing_to_it() -> None:
    with avow.record() as found:
        note("in time", certificate())
        later = contextvars.copy_context()
    later.run(note, "too late", certificate())
    assert [layer for layer, _ in found] == ["in time"]


class Two(nn.Module):
    """Two attentions of avow, and one that calls the function that stands in for SDPA."""

    def __init__(self, method: str = "exact") -> None:
        super().__init__()
        self.layers = nn.ModuleList([Attention(16, 4, method), Attention(16, 4, method, causal=True)])

    def attended(self, x: torch.Tensor) -> torch.Tensor:
        return avow.scaled_dot_product_attention(*3 * (x.unsqueeze(1),)).squeeze(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.attended(x)


@pytest.mark.parametrize("method", ["exact", "separable", "random_features"])
def test_modules_of_avow_are_recorded_and_answer_the_same(method: str) -> None:
    model, x = Two(method), torch.randn(2, 9, 16)
    out = model(x)
    with avow.record() as found:
        torch.testing.assert_close(model(x), out)
    assert [layer for layer, _ in found] == ["Attention", "Attention", "scaled_dot_product_attention"]
    assert [one.method for _, one in found] == [method, method, "exact"]
    assert ("which is not softmax attention" in str(found)) == (method == "separable")


def test_a_record_of_a_model_names_its_layers_and_leaves_no_hooks() -> None:
    model, x = Two(), torch.randn(2, 9, 16)
    with avow.record(model) as found:
        model(x)
    # The model itself has no name, and a call of its own goes by what was called.
    assert list(found.layers) == ["layers.0", "layers.1", "scaled_dot_product_attention"]
    assert not any(module._forward_pre_hooks for module in model.modules())
    with avow.record() as found:
        model(x)
    assert list(found.layers) == ["Attention", "scaled_dot_product_attention"]


def test_a_layer_that_raises_does_not_lend_its_name_to_later_ones() -> None:
    model = Two()
    with avow.record(model) as found:
        with pytest.raises(avow.InputError):
            model.layers[1](torch.randn(2, 9, 15))
        avow.scaled_dot_product_attention(*torch.randn(3, 1, 5, 4).unbind())
    assert list(found.layers) == ["scaled_dot_product_attention"]


def test_what_is_not_a_model_names_nothing() -> None:
    with pytest.raises(avow.InputError, match=r"model=3 must be a torch\.nn\.Module"), avow.record(3):
        pass
