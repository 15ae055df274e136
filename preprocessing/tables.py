"""Tables of Parquet and Arrow files: batches of rows from any row on, and the text of columns, however nested.

A dotted name reaches into structs; texts of a list become a line each (fields.py says the same of JSON). Needs pyarrow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from preprocessing.cli import CorpusError
from preprocessing.fields import find_field

_KINDS = {"parquet": "Parquet", "arrow": "Arrow"}
_TEXTS = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")  # bytes may be UTF-8
_LISTS = ("list", "large_list", "fixed_size_list")
_BUFFER_BYTES = 1 << 20


class Columns:
    """Columns of rows, and the text in them. name: of the file or dataset, for messages."""

    def __init__(self, name: Path | str, schema: Any) -> None:
        import pyarrow
        import pyarrow.compute

        self.schema = schema
        self._name, self._types, self._compute = name, pyarrow.types, pyarrow.compute

    def column_of(self, name: str) -> str:
        """The column that a dotted name begins with."""
        return name if name in self.schema.names else name.partition(".")[0]

    def check_text(self, name: str) -> None:
        """Raises CorpusError, with the names that would do, unless a dotted name leads to text."""
        textual = list(self._names(self.schema))
        if name in textual:
            return
        kind = self._type_of(name)
        found = "is not there" if kind is None else f"holds {kind}, not text"
        remedy = f"set --text_field to one of {', '.join(textual)}" if textual else "no other column holds text"
        raise CorpusError(f"{self._name}: the column '{name}' {found}; {remedy}")

    def _names(self, fields: Any, before: str = "") -> Iterator[str]:
        """Dotted names of all text in a schema or struct."""
        for field in fields:
            kind = self._inner(field.type)
            if self._is_a(kind, _TEXTS) or self._is_conversation(field.type):
                yield before + field.name
            elif self._types.is_struct(kind):
                yield from self._names(kind, f"{before}{field.name}.")

    def _type_of(self, name: str) -> Any:
        fields: Any = {field.name: field.type for field in self.schema}
        while name not in fields:
            head, _, name = name.partition(".")
            kind = self._inner(fields[head]) if head in fields else None
            if kind is None or not self._types.is_struct(kind):
                return None
            fields = {field.name: field.type for field in kind}
        return fields[name]

    def _inner(self, kind: Any) -> Any:
        """Without lists and dictionaries around it."""
        while self.is_list(kind) or self._types.is_dictionary(kind):
            kind = kind.value_type
        return kind

    def _is_conversation(self, kind: Any) -> bool:
        """Whether a column holds lists of messages."""
        inner = kind.value_type if self.is_list(kind) else None
        names = {field.name for field in inner} if inner is not None and self._types.is_struct(inner) else set()
        return {"role", "content"} <= names

    def is_list(self, kind: Any) -> bool:
        return self._is_a(kind, _LISTS)

    def is_integer(self, kind: Any) -> bool:
        return self._types.is_integer(kind)

    def lengths(self, lists: Any) -> list[int]:
        """Items of each row of a column of lists; 0 of null."""
        return self._compute.call_function("list_value_length", [lists]).fill_null(0).to_pylist()

    def _is_a(self, kind: Any, names: Sequence[str]) -> bool:
        return any(getattr(self._types, f"is_{name}")(kind) for name in names)

    def texts(self, batch: Any, name: str) -> list[bytes | list[Any] | None]:
        """The text of each row, which may be no UTF-8; None where any of it is null. Of conversations, the messages."""
        column = self.column_of(name)
        if self._is_conversation(self._type_of(name)):
            return [find_field(row, name) for row in self.records(batch, [name])]
        return list(self._texts(batch.column(column), name[len(column) + 1 :]))

    def records(self, batch: Any, names: Sequence[str]) -> list[dict[str, Any]]:
        """The rows of a batch with the columns that dotted names begin with, as Python's objects."""
        columns = dict.fromkeys(self.column_of(name) for name in names)
        try:
            return batch.select([name for name in columns if name in self.schema.names]).to_pylist()
        except UnicodeDecodeError as error:
            raise CorpusError(f"{self._name}: a text in it is not valid UTF-8 ({error})") from None

    def _texts(self, values: Any, name: str) -> list[bytes | None]:
        if self._types.is_dictionary(values.type):
            return self._texts(values.dictionary_decode(), name)
        if self.is_list(values.type):
            items = iter(self._texts(values.flatten(), name))  # rows that are null hold nothing
            found: list[bytes | None] = []
            for there, length in zip(values.is_valid().to_pylist(), self.lengths(values), strict=True):
                row = [next(items) for _ in range(length)]
                whole = [text for text in row if text is not None]
                found.append(b"\n".join(whole) if there and len(whole) == length else None)
            return found
        if name:
            fields = [field.name for field in values.type]
            head, rest = (name, "") if name in fields else name.split(".", 1)
            options = self._compute.StructFieldOptions([fields.index(head)])
            return self._texts(self._compute.call_function("struct_field", [values], options), rest)
        return values.cast("large_binary").to_pylist()


class Table(Columns):
    """An opened file. kind: "parquet", or "arrow": the file or stream format of Arrow's IPC, as `datasets` saves it."""

    def __init__(self, path: Path | str, kind: str, source: Any) -> None:
        import pyarrow.ipc
        import pyarrow.parquet

        self._is_parquet, self._source = kind == "parquet", source
        if self._is_parquet:
            self._table: Any = pyarrow.parquet.ParquetFile(source, buffer_size=_BUFFER_BYTES)
            super().__init__(path, self._table.schema_arrow)
            return
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        self._table = pyarrow.ipc.open_file(source) if is_file else pyarrow.ipc.open_stream(source)
        super().__init__(path, self._table.schema)

    def batches(self, columns: Sequence[str], first: int, size: int) -> Iterator[tuple[Any, float]]:
        """Batches of at most `size` rows from row `first` on, each with the fraction of the file read behind it."""
        if self._is_parquet:
            yield from self._parquet_batches(columns, first, size)
            return
        table, total, row = self._table, self._source.size(), 0
        known = hasattr(table, "num_record_batches")
        for batch in map(table.get_batch, range(table.num_record_batches)) if known else table:
            for start in range(min(max(first - row, 0), batch.num_rows), batch.num_rows, size):
                yield batch.slice(start, size), self._source.tell() / total
            row += batch.num_rows

    def _parquet_batches(self, columns: Sequence[str], first: int, size: int) -> Iterator[tuple[Any, float]]:
        metadata = self._table.metadata
        sizes = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        group, skip, row = 0, first, first
        while group < len(sizes) and skip >= sizes[group]:
            skip -= sizes[group]
            group += 1
        for batch in self._table.iter_batches(size, range(group, len(sizes)), list(columns)):
            kept = batch.slice(skip)
            skip = max(0, skip - batch.num_rows)
            row += kept.num_rows
            if kept.num_rows:
                yield kept, row / metadata.num_rows


@contextmanager
def open_table(path: Path | str, kind: str, file: BinaryIO | None = None) -> Iterator[Table]:
    """Opens a file on the disk, mapped to memory where it can be, or one that is open already. Raises CorpusError where
    pyarrow is missing, and where the file, or what is read of it meanwhile, is damaged."""
    try:
        import pyarrow
    except ImportError:
        raise CorpusError(f"reading {path} needs a package that is not installed: pip install pyarrow") from None
    try:
        if file is not None:
            source = pyarrow.PythonFile(file, "r")
        else:
            source = pyarrow.OSFile(str(path)) if kind == "parquet" else pyarrow.memory_map(str(path))
        with source:
            yield Table(path, kind, source)
    except pyarrow.ArrowException as error:
        reason = str(error).splitlines()[0]
        raise CorpusError(f"{path} is damaged or not {_KINDS[kind]} ({reason}); get it again") from None
