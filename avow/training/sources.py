"""Where data comes from: text files, token ids, columns of tables, datasets, corpus folders.

| source | documents |
|---|---|
| `notes.txt`, `texts/*.txt`, any other file | a file is a document, in UTF-8, every character as it stands |
| `tokens.npy` | a one-dimensional array of token ids is one, a two-dimensional one has one in each row |
| `table.parquet:column` | one in each row; without a name, the column `text` |
| `lines.jsonl:field` | one in each line |
| a folder that `datasets` saved, `folder:column` | one in each row |
| a folder with wiki.txt or train.tsv | see `avow.training.data` |
| another folder | its .txt files, each a document |
| `invented` | the embedded corpus |

A document that holds nothing is left out and counted; a source that holds nothing else is an error.
"""

from __future__ import annotations

import glob
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from avow import file_io
from avow.errors import FileError
from avow.extras import require
from avow.parameters import declared
from avow.training.data import (
    INVENTED,
    Corpus,
    Document,
    TokenDocument,
    check_not_empty,
    corpus_of,
    not_asked,
    read_text,
)

# The column or field that is read if none is named.
DEFAULT_COLUMN = "text"
# Files of these kinds hold a document in each row or line, under a name that may follow a colon.
_TABLES = (".parquet", ".jsonl")
# A folder with one of these is a corpus or a dataset, and not a folder of texts.
_WHOLE_FOLDERS = ("wiki.txt", "train.tsv", "state.json", "dataset_dict.json")


@declared()
def read_data(sources: Sequence[str]) -> Corpus:
    """The documents and questions of some sources, in their order.

    Args:
        sources: text files, `tokens.npy`, `x.parquet:column`, `x.jsonl:field`, folders, patterns such as `texts/*.txt`,
            or `invented`.

    Returns:
        The corpus.

    Raises:
        FileError: a source is missing, empty, or cannot be read.
        MissingPackage: a package that reads it is not installed.

    >>> from avow.training import read_data
    >>> len(read_data(["invented"]).documents) > 100
    True
    """
    check_not_empty("sources", sources)
    parts = [_read(path) for source in sources for path in _expanded(source)]
    documents, train, dev = ([x for part in parts for x in getattr(part, n)] for n in ("documents", "train", "dev"))
    empty, asked = (sum(getattr(part, name) for part in parts) for name in ("empty", "asked"))
    kept = not_asked(train, dev)
    return Corpus(tuple(documents), kept, tuple(dev), empty, asked + len(train) - len(kept))


def _expanded(source: str) -> list[str]:
    """The sources that a pattern such as texts/*.txt or a folder of texts stands for, in order; another is itself."""
    path, column = _parted(source)
    if not column and Path(path).is_dir() and not any((Path(path) / one).exists() for one in _WHOLE_FOLDERS):
        return sorted(map(str, Path(path).glob("*.txt"))) or [source]
    if not glob.has_magic(path) or Path(path).exists():
        return [source]
    found = sorted(glob.glob(path, recursive=True))
    if not found:
        raise FileError("data", source, "matches no file", "check the pattern")
    # Two stars match folders too, and what is in them beside them.
    found = [one for one in found if "**" not in path or Path(one).is_file()]
    return [f"{one}:{column}" if column else one for one in found]


def _parted(source: str) -> tuple[str, str]:
    """The path of a source and, after a colon, the name of its column, or nothing."""
    path, colon, column = source.rpartition(":")
    tabular = path.endswith(_TABLES) or Path(path).is_dir()
    return (path, column) if colon and tabular and not Path(source).exists() else (source, "")


def _read(source: str) -> Corpus:
    if source == INVENTED:
        return corpus_of(source)
    name, column = _parted(source)
    path = Path(name)
    if not path.exists():
        rule = "does not exist"
        if re.search(r":\w+$", source):
            rule += f"; a column is named for {', '.join(_TABLES)} and folders alone"
        remedy = "give files, a folder, or invented"
        if any(Path(part).exists() for part in source.split(",")):
            remedy = "name each source on its own: repeat --data"
        raise FileError("data", source, rule, remedy)
    if path.is_dir() and any((path / one).exists() for one in ("wiki.txt", "train.tsv")):
        return corpus_of(name)
    documents: Iterator[Document | TokenDocument]
    if path.is_dir():
        documents = _dataset(path, column or DEFAULT_COLUMN)
    elif path.suffix == ".npy":
        documents = _token_ids(path)
    elif path.suffix == ".jsonl":
        documents = _json_lines(path, column or DEFAULT_COLUMN)
    elif path.suffix == ".parquet":
        documents = _parquet(path, column or DEFAULT_COLUMN)
    else:
        documents = iter([Document(read_text(path), str(path))])
    every = list(documents)
    held = tuple(one for one in every if len(one.text if isinstance(one, Document) else one.ids))
    if not held:
        raise FileError("data", source, "is empty", "give a source that holds at least one document")
    return Corpus(held, (), (), len(every) - len(held))


def _token_ids(path: Path) -> Iterator[TokenDocument]:
    with _readable(path):
        try:
            # Nothing in it is unpickled, and it is read as it is needed.
            found = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise FileError(
                "data", path, f"is not an array of numbers ({error})", "write it with numpy.save"
            ) from error
    if not isinstance(found, np.ndarray) or not np.issubdtype(found.dtype, np.integer):
        kind = getattr(found, "dtype", type(found).__name__)
        raise FileError("data", path, f"holds {kind}, not whole numbers", "save token ids as uint16, int32 or int64")
    if found.ndim not in (1, 2):
        rule = f"has shape {found.shape}, not (length,) or (documents, length)"
        raise FileError("data", path, rule, "save one row for each document")
    if found.dtype == np.uint64 and found.size and int(found.max()) > np.iinfo(np.int64).max:
        raise FileError("data", path, "holds ids beyond 2**63 − 1", "save the ids of a vocabulary")
    for number, row in enumerate(np.atleast_2d(found)):
        yield TokenDocument(np.asarray(row), str(path) if found.ndim == 1 else f"{path} row {number}")


def _json_lines(path: Path, field: str) -> Iterator[Document]:
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise FileError(where, repr(line[:40]), f"is not JSON ({error})", "correct that line") from error
        if not isinstance(row, dict) or field not in row:
            fields = ", ".join(row) if isinstance(row, dict) else "none"
            rule = f"has no field {field!r} (it has {fields})"
            raise FileError(where, repr(line[:40]), rule, f"name another: {path}:FIELD")
        if not isinstance(row[field], str):
            rule = f"holds {json.dumps(row[field])[:40]} in {field!r}, which is not text"
            raise FileError(where, repr(line[:40]), rule, "name a field of texts")
        yield Document(row[field], where)


def _parquet(path: Path, column: str) -> Iterator[Document]:
    arrow = _pyarrow()
    from pyarrow import parquet

    with _readable(path), _whole(arrow, path):
        file = parquet.ParquetFile(path)
        _check_column(arrow, path, column, file.schema_arrow)
        yield from _rows(path, (batch.column(0) for batch in file.iter_batches(columns=[column])))


def _dataset(folder: Path, column: str) -> Iterator[Document]:
    """The rows of a dataset that `save_to_disk` of the library datasets wrote."""
    if (folder / "dataset_dict.json").exists():
        splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
        rule = f"holds several splits ({', '.join(splits)})"
        raise FileError("data", folder, rule, f"name one of them: {folder / (splits or ['train'])[0]}")
    if not (folder / "state.json").exists():
        rule = "holds no .txt files, no train.tsv, and no dataset that save_to_disk wrote"
        raise FileError("data", folder, rule, f"name its files, for example {folder}/*.md")
    with _readable(folder):
        try:
            state = json.loads(file_io.read_document(folder / "state.json"))
            files = [folder / str(one["filename"]) for one in state["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            rule = "has a state.json that save_to_disk did not write"
            raise FileError("data", folder, rule, "save the dataset again") from error
    if state.get("_indices_data_files"):
        rule = "was saved with indices, which are not read here"
        raise FileError("data", folder, rule, "save dataset.flatten_indices() instead")
    arrow = _pyarrow()
    from pyarrow import ipc

    first = 0
    for path in files:
        with _readable(path), _whole(arrow, path), arrow.OSFile(str(path)) as file:
            reader = ipc.open_stream(file)
            _check_column(arrow, folder, column, reader.schema)
            for document in _rows(folder, (batch.column(column) for batch in reader), first):
                first += 1
                yield document


def _rows(source: Path, columns: Iterator[Any], first: int = 0) -> Iterator[Document]:
    number = first
    for column in columns:
        for text in column.to_pylist():
            where = f"{source} row {number}"
            if text is None:
                raise FileError(where, "null", "holds no text", "leave such rows out of the table")
            yield Document(text, where)
            number += 1


def _check_column(arrow: Any, path: Path, column: str, schema: Any) -> None:
    if column not in schema.names:
        rule = f"has no column {column!r} (it has {', '.join(schema.names)})"
        raise FileError("data", path, rule, f"name another: {path}:COLUMN")
    kind = schema.field(column).type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind) or arrow.types.is_string_view(kind)):
        raise FileError("data", path, f"has {kind} in the column {column!r}, not text", "name a column of texts")


def _pyarrow() -> Any:
    require("pyarrow", purpose="to read parquet and arrow files")
    import pyarrow

    return pyarrow


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        rule = f"cannot be read ({error.strerror or str(error)[:80]})"
        raise FileError("data", path, rule, "check the path, and that the file is whole") from error


@contextmanager
def _whole(arrow: Any, path: Path) -> Iterator[None]:
    """Inside, what pyarrow finds wrong with a file is an error of ours."""
    try:
        yield
    except (arrow.ArrowException, UnicodeDecodeError) as error:
        kind = "parquet" if path.suffix == ".parquet" else "arrow"
        rule = f"is not a whole {kind} file ({str(error)[:80]})"
        raise FileError("data", path, rule, "write it again") from error
