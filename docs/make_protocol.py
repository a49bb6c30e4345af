"""docs/protocol.md out of proto/*.proto: `make proto` writes it, `make proto-check` says whether it is fresh."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
)
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "docs" / "protocol.md"
ORDER = ("common", "worker", "peer", "cache", "admin", "engine")
TITLES = {
    "common": "What all share",
    "worker": "Worker to daemon",
    "peer": "Daemon to daemon",
    "cache": "Statistics and look-up",
    "admin": "Operator to daemon",
    "engine": "Front end to engine server",
}
MESSAGE, ENUM, SERVICE = 4, 5, 6  # fields of FileDescriptorProto, in the paths of source locations
HEAD = """# Protocol reference

Made from `proto/*.proto` by `make proto`; change those. gRPC, package `kvferry.v1`. Numbers in brackets are those of
fields. Every inbound length and count has a bound, which the error names; bounds of messages are in `proto/limits.py`.
"""


def descriptors() -> list[FileDescriptorProto]:
    """The files' descriptors, with their comments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set"
        files = [f"{ROOT}/proto/{name}.proto" for name in ORDER]
        words = ["protoc", f"-Ikvferry/proto={ROOT}/proto", "--include_source_info", f"--descriptor_set_out={out}"]
        if protoc.main([*words, *files]) != 0:
            raise SystemExit("protoc failed")
        found = FileDescriptorSet.FromString(out.read_bytes())
    by_name = {Path(file.name).stem: file for file in found.file}
    return [by_name[name] for name in ORDER]


class Comments:
    """Comments of one file, by the path of what they stand at."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._leading = {tuple(where.path): where.leading_comments for where in file.source_code_info.location}
        self._trailing = {tuple(where.path): where.trailing_comments for where in file.source_code_info.location}
        first = next((where for where in file.source_code_info.location if tuple(where.path) == (12,)), None)
        self.of_file = _joined("\n".join(first.leading_detached_comments) + first.leading_comments) if first else ""

    def at(self, *path: int) -> str:
        return _joined(self._leading.get(path, "") or self._trailing.get(path, ""))


def _joined(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def pages() -> Iterator[str]:
    yield HEAD
    for file in descriptors():
        comments = Comments(file)
        yield f"## {TITLES[Path(file.name).stem]}\n\n`proto/{Path(file.name).name}`"
        if comments.of_file:
            yield comments.of_file
        for index, service in enumerate(file.service):
            rows = ["| call | takes | gives |", "|---|---|---|"]
            for method in service.method:
                takes, gives = (
                    f"{'stream of ' if stream else ''}`{_short(kind)}`"
                    for kind, stream in (
                        (method.input_type, method.client_streaming),
                        (method.output_type, method.server_streaming),
                    )
                )
                rows.append(f"| `{service.name}/{method.name}` | {takes} | {gives} |")
            yield "\n".join(filter(None, [comments.at(SERVICE, index), ""])) + "\n".join(rows)
        for index, enum in enumerate(file.enum_type):
            yield _enum(enum, comments, index)
        for index, message in enumerate(file.message_type):
            yield _message(message, comments, index)


def _enum(enum: EnumDescriptorProto, comments: Comments, index: int) -> str:
    rows = [f"### {enum.name}", "", comments.at(ENUM, index), "", "| value | is |", "|---|---|"]
    rows += [f"| `{v.name}` ({v.number}) | {comments.at(ENUM, index, 2, i)} |" for i, v in enumerate(enum.value)]
    return _squeezed(rows)


def _message(message: DescriptorProto, comments: Comments, index: int) -> str:
    rows = [f"### {message.name}", "", comments.at(MESSAGE, index), ""]
    if message.field:
        rows += ["| field | type | is |", "|---|---|---|"]
    for number, field in enumerate(message.field):
        words = comments.at(MESSAGE, index, 2, number)
        if field.HasField("oneof_index"):
            words = f"one of `{message.oneof_decl[field.oneof_index].name}`. {words}".strip()
        rows.append(f"| `{field.name}` ({field.number}) | {_type(field)} | {words} |")
    return _squeezed(rows)


def _squeezed(rows: list[str]) -> str:
    """The lines without empty ones that follow one another."""
    kept = [row for i, row in enumerate(rows) if row or (i and rows[i - 1])]
    return "\n".join(kept).rstrip()


def _type(field: FieldDescriptorProto) -> str:
    many = "repeated " if field.label == FieldDescriptorProto.LABEL_REPEATED else ""
    if field.type_name:
        return f"{many}`{_short(field.type_name)}`"
    return many + FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def main() -> int:
    text = "\n\n".join(page.strip() for page in pages()) + "\n"
    if "--check" in sys.argv[1:]:
        if TARGET.read_text() != text:
            print("stale: docs/protocol.md; run make proto", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
