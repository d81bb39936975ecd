"""What is extracted from a model is what its attention gets; the trained one is in tests/test_trained_model.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from avow.bench.cases import stored
from avow.integrations.transformers.model_files import Loaded
from benchmarks import extract_heads
from benchmarks.extract_heads import TEXTS, Recorded, extract, main, recorded, stored_rows
from tests.helpers.recorded_heads import attended


def loaded(layers: int = 3) -> Loaded:
    """A small model with random weights, whose tokens are characters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 32, "num_attention_heads": 6, "num_key_value_heads": 2}
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=128, num_hidden_layers=layers, max_position_embeddings=512, **sizes)
    )

    def tokens(text: str, **_: Any) -> SimpleNamespace:
        return SimpleNamespace(input_ids=torch.tensor([[ord(letter) % 128 for letter in text]]))

    return Loaded(model.eval(), tokens, "small")


def test_what_is_recorded_gives_what_attention_gave() -> None:
    model, rows = loaded().model, stored_rows(40, 7)
    assert rows.tolist() == [15, 19, 23, 27, 31, 35, 39]
    before = model.config._attn_implementation
    found = recorded(model, torch.randint(128, (1, 40)), [0, 2], rows)
    assert sorted(found) == [0, 2] and model.config._attn_implementation == before
    for one in found.values():
        assert one.q.shape == (6, 7, 8) and one.k.shape == one.v.shape == (2, 40, 8)
        assert torch.allclose(attended(one, rows), one.out.double(), atol=1e-6)
        # The same with keys of other places is another answer: the comparison can fail.
        assert not torch.allclose(attended(one._replace(k=one.k.flip(1)), rows), one.out.double(), atol=1e-4)


def test_files_are_what_benchmarks_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extract_heads, "load_model", lambda source: loaded())
    for text in ("code", "table"):
        assert (
            main(["--out", str(tmp_path), "--text", text, "--layers", "1,2", "--tokens", "300", "--queries", "50"]) == 0
        )
    names = [f"{text}-layer{layer}.safetensors" for text in ("code", "table") for layer in ("01", "02")]
    assert sorted(file.name for file in tmp_path.iterdir()) == names
    assert capsys.readouterr().out.count("wrote ") == 4
    texts = stored(tmp_path)
    assert {text: [load.kind for load in loads] for text, loads in texts.items()} == {
        "code": ["code-layer01", "code-layer02"],
        "table": ["table-layer01", "table-layer02"],
    }
    tensors = load_file(tmp_path / names[0])
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        "q": (6, 50, 8), "k": (2, 300, 8), "v": (2, 300, 8), "q_positions": (50,)
    }  # fmt: skip
    assert {x.dtype for name, x in tensors.items() if name != "q_positions"} == {torch.float16}
    assert tensors["q_positions"].tolist() == list(range(103, 300, 4))


def test_texts_are_of_several_kinds_and_long_enough() -> None:
    texts = {name: get() for name, (_, get) in TEXTS.items()}
    # A token of these texts is at most four characters on average.
    assert all(len(text) > 4 * extract_heads.TOKENS for text in texts.values())
    assert "def " in texts["code"] and texts["table"].splitlines()[33] == "0041;LATIN CAPITAL LETTER A;Lu;0;L"


def test_a_file_of_text_is_named_after_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract_heads, "load_model", lambda source: loaded())
    (tmp_path / "verse.txt").write_text("It was the lark, the herald of the morn. " * 3)
    arguments = ["--out", str(tmp_path / "heads"), "--layers", "0", "--tokens", "64"]
    assert main([*arguments, "--text", str(tmp_path / "verse.txt")]) == 0
    assert [file.name for file in (tmp_path / "heads").iterdir()] == ["verse-layer00.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--text", "nowhere"], "text=nowhere is not a file; name one, or code, table, manual"),
        (["--layers", "3"], "layers=3 must be from 0 to 2; name layers of the model"),
        (["--layers", "one"], "layers=one must be whole numbers with commas between; try --layers 4,13"),
        (["--queries", "0"], "queries=0 must be at least 2; leave --queries out"),
        (["--tokens", "600", "--layers", "0"], "tokens=600 exceeds the model's 512 positions; ask for at most 512"),
    ],
)
def test_nonsense_is_named(
    arguments: list[str], line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(extract_heads, "load_model", lambda source: loaded())
    assert main(["--out", str(tmp_path), "--tokens", "300", *arguments]) == 2
    assert capsys.readouterr().err == line + "\n" and list(tmp_path.iterdir()) == []


def test_numbers_beyond_float16_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    large = Recorded(*(torch.full((1, 2, 4), 1e6),) * 4, 1.0)
    monkeypatch.setattr(extract_heads, "recorded", lambda *_: {1: large})
    with pytest.raises(ValueError, match="layers=1 has numbers beyond those of float16"):
        extract(loaded(), "some text", 8, 2, [1])
