"""Check what linters do not: lengths, ASCII, banned names, the documented layout, dead files.

Run as `python tools/tidy.py [ROOT]`; prints one line a finding and exits 1 if there is any.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LINES_MAX = {".py": 500, ".cc": 400, ".h": 400}
INIT_LINES_MAX = 60
FUNCTION_LINES_MAX = 70
ASCII_SUFFIXES = {".py", ".pyi", ".cc", ".h", ".sh", ".toml", ".txt"}
BANNED = {"info", "manager", "misc", "common", "util", "utils", "ulog", "ckpt"}
# What in C++ text is not code: comments, literals, preprocessor lines.
NOT_CODE = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|(?<!\d)'(?:\\.|[^'\\\n])*'"
    r"|^[ \t]*#(?:\\\n|[^\n])*",
    flags=re.DOTALL | re.MULTILINE,
)
# Start of a type, as in `public: struct alignas(64) Slot {`: no function despite its parenthesis.
TYPE_HEADER = re.compile(r"\s*(?:\w+\s*:(?!:)\s*)?(?:template\s*<.*>\s*)?(?:class|struct|enum)\b")

# (path, kind of finding): the reason why it stays.
EXCEPTIONS: dict[tuple[str, str], str] = {}


def words(name: str) -> set[str]:
    """Lower-case words of a snake_case or CamelCase name."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)}


def check_any(path: Path, text: str) -> Iterator[str]:
    """Files of any kind: name, length, characters."""
    if words(path.stem) & BANNED:
        yield f"banned name: {path.name}"
    limit = INIT_LINES_MAX if path.name == "__init__.py" else LINES_MAX.get(path.suffix)
    if limit is not None and (count := text.count("\n")) > limit:
        yield f"file length: {count} lines, at most {limit}"
    if path.suffix in ASCII_SUFFIXES or path.name in {"Makefile", "CMakeLists.txt"}:
        for number, line in enumerate(text.splitlines(), 1):
            if not line.isascii():
                yield f"ASCII: line {number} has {next(c for c in line if not c.isascii())!r}"


def defined_name(node: ast.AST) -> str | None:
    """Name that this node defines, if it defines one."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return name
        case ast.arg(arg=name) | ast.Name(name, ast.Store()) | ast.Attribute(_, name, ast.Store()):
            return name
    return None


def check_python(text: str) -> Iterator[str]:
    """Functions that are too long, and names that say nothing."""
    for node in ast.walk(ast.parse(text)):
        name = defined_name(node)
        if name and (banned := words(name) & BANNED):
            yield f"banned name: {name!r} ({', '.join(banned)})"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                yield f"function length: {name}: {length} lines, at most {FUNCTION_LINES_MAX}"


def code_only(text: str) -> str:
    """C++ text with everything that is not code blanked out; line numbers stay."""
    return NOT_CODE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)


def check_cpp(text: str) -> Iterator[str]:
    """Function bodies that are too long (a lambda counts as part of its function), type names."""
    code = code_only(text)
    for kind, name in re.findall(r"\b(class|struct|namespace)\s+(\w+)", code):
        if words(name) & BANNED:
            yield f"banned name: {kind} {name!r}"
    inside: list[bool] = []  # for each open brace: does it open, or lie in, a function body?
    start, header = 0, 0
    for match in re.finditer(r"[{};]", code):
        if match[0] == "{":
            before = code[header : match.start()]
            is_body = ")" in before and not TYPE_HEADER.match(before)
            if is_body and not any(inside):
                name = (re.search(r"([\w:~]+)\s*\(", before) or ["?", "?"])[1]
                start = code.count("\n", 0, header + len(before) - len(before.lstrip()))
            inside.append(is_body or any(inside))
        elif match[0] == "}" and inside and inside.pop() and not any(inside):
            length = code.count("\n", 0, match.start()) - start + 1
            if length > FUNCTION_LINES_MAX:
                yield f"function length: {name}: {length} lines, at most {FUNCTION_LINES_MAX}"
        header = match.end()


def check_layout(files: dict[Path, str]) -> Iterator[tuple[Path, str]]:
    """Constants of the layout that the description of the format does not name."""
    layout, described = Path("csrc/layout.h"), Path("docs/format.md")
    if layout in files and described in files:
        for name in re.findall(r"\bconstexpr\s+[\w:]+\s+(\w+)\s*=", code_only(files[layout])):
            if not re.search(rf"\b{name}\b", files[described]):
                yield layout, f"undocumented: {name} is not in {described}"


def check_dead(files: dict[Path, str]) -> Iterator[tuple[Path, str]]:
    """Modules, headers, scripts and pages that no other file mentions."""
    roots = ("src", "csrc", "tools", "benchmarks", "examples", "docs")
    for path in files:
        is_kind = path.parts[0] in roots and path.suffix in {".py", ".h", ".sh", ".md"}
        if is_kind and not path.stem.startswith("__"):
            mention = re.compile(rf"\b{re.escape(path.stem)}\b")
            others = (text for other, text in files.items() if other != path)
            if not any(mention.search(text) for text in others):
                yield path, "dead file: no other file mentions it"


def findings(root: Path) -> Iterator[tuple[Path, str]]:
    """All findings under `root`, a git checkout, new files included."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True).stdout.decode()
    files: dict[Path, str] = {}
    for name in filter(None, names.split("\0")):
        if (root / name).is_file():
            files[Path(name)] = (root / name).read_text(encoding="utf-8", errors="replace")
    for path, text in files.items():
        checks = [check_any(path, text)]
        checks += [check_python(text)] if path.suffix == ".py" else []
        checks += [check_cpp(text)] if path.suffix in {".cc", ".h"} else []
        yield from ((path, what) for check in checks for what in check)
    yield from check_layout(files)
    yield from check_dead(files)


def main(root: Path) -> int:
    """Print the findings that no exception covers; return how many there are."""
    left = [
        f"{path}: {what}"
        for path, what in findings(root)
        if (str(path), what.partition(":")[0]) not in EXCEPTIONS
    ]
    print("\n".join(left) or "tidy")
    return len(left)


if __name__ == "__main__":
    sys.exit(bool(main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))))
