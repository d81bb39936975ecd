"""Data is read from the files that people have, all of it; what cannot be read is named."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from avow.errors import AvowError, FileError, MissingPackage, ParameterError
from avow.training import Corpus, Document, TokenDocument, invent, read_data, write_corpus

TEXTS = ["first document", "zweites\r\nDokument\n", "третий 🙂"]


def texts(corpus: Corpus) -> list[str]:
    assert all(isinstance(document, Document) for document in corpus.documents)
    return [document.text for document in corpus.documents]  # type: ignore[union-attr]


def text_files(folder: Path) -> str:
    folder.mkdir()
    for name, text in zip("abc", TEXTS, strict=True):
        (folder / f"{name}.txt").write_bytes(text.encode())
    return f"{folder}/*.txt"


def json_lines(folder: Path) -> str:
    lines = [json.dumps({"id": i, "body": text}) for i, text in enumerate(TEXTS)]
    folder.with_suffix(".jsonl").write_text("\n".join(lines) + "\n\n")
    return f"{folder}.jsonl:body"


def table() -> Any:
    return pa.table({"id": list(range(len(TEXTS))), "body": TEXTS})


def parquet_file(folder: Path) -> str:
    parquet.write_table(table(), f"{folder}.parquet", row_group_size=2)
    return f"{folder}.parquet:body"


def dataset(folder: Path) -> str:
    """As `Dataset.save_to_disk` writes one, in two shards."""
    folder.mkdir()
    names = []
    for number, part in enumerate((table().slice(0, 1), table().slice(1))):
        names.append(f"data-{number:05d}-of-00002.arrow")
        with pa.OSFile(str(folder / names[-1]), "wb") as file, pa.ipc.new_stream(file, part.schema) as stream:
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "00", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")
    return f"{folder}:body"


@pytest.mark.parametrize("made", [text_files, json_lines, parquet_file, dataset], ids=lambda one: one.__name__)
def test_every_character_of_every_document_is_there(tmp_path: Path, made: Any) -> None:
    source = made(tmp_path / "data")
    found = read_data([source])
    assert texts(found) == TEXTS and found.empty == 0
    assert len({document.where for document in found.documents}) == 3
    # Several sources follow each other.
    other = tmp_path / "more.md"
    other.write_text("more")
    assert texts(read_data([str(other), source])) == ["more", *TEXTS]


def test_token_ids_are_one_document_or_one_a_row(tmp_path: Path) -> None:
    ids = np.arange(6, dtype=np.uint16)
    np.save(tmp_path / "flat.npy", ids)
    np.save(tmp_path / "rows.npy", ids.reshape(2, 3))
    for name, expected in (("flat", [[0, 1, 2, 3, 4, 5]]), ("rows", [[0, 1, 2], [3, 4, 5]])):
        found = read_data([str(tmp_path / f"{name}.npy")]).documents
        assert [one.ids.tolist() for one in found if isinstance(one, TokenDocument)] == expected


def test_a_corpus_folder_and_the_invented_corpus_are_sources(tmp_path: Path) -> None:
    corpus = invent(people=10)
    write_corpus(corpus, tmp_path / "people")
    found = read_data([str(tmp_path / "people")])
    assert (found.digest, found.dev_digest) == (corpus.digest, corpus.dev_digest)
    both = read_data(["invented", str(tmp_path / "people")])
    assert len(both.documents) == 640 + 40 and len(both.train) + both.asked == 96 + 6
    # Both corpora draw their names from the same ones.
    assert both.asked > 0 and {q.question for q in both.train}.isdisjoint(q.question for q in both.dev)


def test_the_column_is_text_if_none_is_named(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": TEXTS}), f"{tmp_path}/a.parquet")
    (tmp_path / "a.jsonl").write_text('{"text": "x"}')
    assert texts(read_data([f"{tmp_path}/a.parquet", f"{tmp_path}/a.jsonl"])) == [*TEXTS, "x"]


def test_patterns_are_read_in_order_and_two_stars_go_into_folders(tmp_path: Path) -> None:
    for name in ("b.py", "a.py", "deep/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(read_data([f"{tmp_path}/*.py"])) == ["a.py", "b.py"]
    assert sorted(texts(read_data([f"{tmp_path}/**"]))) == ["a.py", "b.py", "deep/c.py"]
    (tmp_path / "odd[1].txt").write_text("its own name")
    assert texts(read_data([f"{tmp_path}/odd[1].txt"])) == ["its own name"]


def test_a_colon_in_a_name_is_no_column(tmp_path: Path) -> None:
    (tmp_path / "a:b.txt").write_text("x")
    assert texts(read_data([f"{tmp_path}/a:b.txt"])) == ["x"]


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    for name, text in (("a", "x"), ("b", ""), ("c", "y")):
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n{"text": "z"}\n')
    with pytest.raises(FileError, match=re.escape("b.txt is empty; give a source that holds at least one document")):
        read_data([f"{tmp_path}/*.txt"])
    found = read_data([f"{tmp_path}/rows.jsonl"])
    assert texts(found) == ["z"] and found.empty == 1


def spoilt(folder: Path) -> dict[str, tuple[Any, str]]:
    """By file name, what is written there, and what is said of it."""
    broken = folder / "broken"
    return {
        "latin.txt": (b"caf\xe9", "latin.txt line 1=byte 3 is not UTF-8; convert the file"),
        "empty.txt": (b"", "empty.txt is empty; give a source that holds at least one document"),
        "none.txt": (None, "none.txt does not exist; give files, a folder, or invented"),
        "none.txt:body": (None, "a column is named for .parquet, .jsonl and folders alone"),
        "*.none": (None, "*.none matches no file; check the pattern"),
        "bad.jsonl": (b'{"text": "a"}\n{', "bad.jsonl line 2='{' is not JSON ("),
        "list.jsonl": (b"[1]", "list.jsonl line 1='[1]' has no field 'text' (it has none)"),
        "other.jsonl": (b'{"body": "a"}', "has no field 'text' (it has body); name another: "),
        "number.jsonl": (b'{"text": 7}', "holds 7 in 'text', which is not text; name a field of texts"),
        "text.npy": (b"words", "is not an array of numbers ("),
        "float.npy": (np.ones(3), "holds float64, not whole numbers; save token ids as uint16, int32 or int64"),
        "deep.npy": (np.ones((2, 2, 2), dtype=int), "has shape (2, 2, 2), not (length,) or (documents, length)"),
        "zero.npy": (np.ones(0, dtype=int), "zero.npy is empty; give a source"),
        "huge.npy": (np.array([2**63], dtype=np.uint64), "holds ids beyond 2**63 − 1; save the ids of a vocabulary"),
        "object.npy": (np.array([{}], dtype=object), "is not an array of numbers ("),
        "words.parquet": (b"words", "is not a whole parquet file ("),
        "id.parquet:id": (table(), "has int64 in the column 'id', not text; name a column of texts"),
        "id.parquet:none": (table(), "has no column 'none' (it has id, body); name another: "),
        "null.parquet": (pa.table({"text": ["a", None]}), "row 1=null holds no text; leave such rows out"),
        f"{broken}": (broken, "holds no .txt files, no train.tsv, and no dataset that save_to_disk wrote; name its"),
    }


def put(path: Path, content: Any) -> None:
    if isinstance(content, Path):
        content.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, np.ndarray):
        np.save(path, content)
    elif content is not None:
        parquet.write_table(content, path)


@pytest.mark.parametrize("name", list(spoilt(Path("/nowhere"))))
def test_what_cannot_be_read_is_named_with_a_rule_and_a_remedy(tmp_path: Path, name: str) -> None:
    name = name.replace("/nowhere", str(tmp_path))
    content, rule = spoilt(tmp_path)[name]
    put(tmp_path / name.partition(":")[0], content)
    with pytest.raises(AvowError, match=re.escape(rule)):
        read_data([str(tmp_path / name)])


def test_nothing_is_not_a_source() -> None:
    with pytest.raises(ParameterError, match=re.escape("sources=[] must hold something to read; give at least one")):
        read_data([])


def spoil_splits(folder: Path) -> str:
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for name in ("train", "test"):
        (folder / name).mkdir()
    return f"holds several splits (test, train); name one of them: {folder}/test"


def spoil_state(folder: Path) -> str:
    (folder / "state.json").write_text("{}")
    return "has a state.json that save_to_disk did not write; save the dataset again"


def spoil_indices(folder: Path) -> str:
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps(state | {"_indices_data_files": [{"filename": "indices.arrow"}]}))
    return "was saved with indices, which are not read here; save dataset.flatten_indices() instead"


def spoil_shard(folder: Path) -> str:
    path = folder / "data-00001-of-00002.arrow"
    path.write_bytes(path.read_bytes()[:-200])
    return "data-00001-of-00002.arrow is not a whole arrow file ("


def spoil_lose(folder: Path) -> str:
    (folder / "data-00001-of-00002.arrow").unlink()
    return "data-00001-of-00002.arrow cannot be read ("


@pytest.mark.parametrize("spoil", [spoil_splits, spoil_state, spoil_indices, spoil_shard, spoil_lose])
def test_a_dataset_that_is_not_whole_is_refused(tmp_path: Path, spoil: Any) -> None:
    source = dataset(tmp_path / "data")
    assert len(read_data([source]).documents) == 3
    rule = spoil(tmp_path / "data")
    with pytest.raises(FileError, match=re.escape(rule)):
        read_data([source])


def test_the_library_that_reads_tables_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [parquet_file(tmp_path / "a"), dataset(tmp_path / "b")]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for source in sources:
        words = "pyarrow is not installed; it is needed to read parquet and arrow files; pip install 'avow[data]'"
        with pytest.raises(MissingPackage, match=re.escape(words)):
            read_data([source])
