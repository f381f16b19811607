"""Each check of tools/tidy.py finds what it is for, and nothing else."""

import importlib.util
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tidy() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tidy", ROOT / "tools" / "tidy.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("build/\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text, encoding="utf-8")


def report(tidy: ModuleType, root: Path) -> list[str]:
    return [f"{path}: {what}" for path, what in tidy.findings(root)]


def test_clean_tree_has_no_findings(tidy: ModuleType, checkout: Path) -> None:
    write(checkout, "src/pool.py", "def read(path: str) -> str:\n    return path\n")
    write(checkout, "docs/index.md", "The pool. \u2192 [next](index)\n")
    write(checkout, "README.md", "See docs/index.md.\n")
    write(checkout, "build/wide.py", "x = 1\n" * 501)
    assert report(tidy, checkout) == []
    assert tidy.main(checkout) == 0


@pytest.mark.parametrize(
    ("name", "lines_max"),
    [("tests/a.py", 500), ("csrc/a.cc", 400), ("tests/a.h", 400), ("src/__init__.py", 60)],
)
def test_file_length(tidy: ModuleType, checkout: Path, name: str, lines_max: int) -> None:
    write(checkout, name, "\n" * lines_max)
    assert report(tidy, checkout) == []
    write(checkout, name, "\n" * (lines_max + 1))
    assert report(tidy, checkout) == [
        f"{name}: file length: {lines_max + 1} lines, at most {lines_max}"
    ]


def test_python_function_length(tidy: ModuleType) -> None:
    function = "def f() -> None:\n" + "    pass\n" * 69
    assert list(tidy.check_python(function)) == []
    assert list(tidy.check_python(function + "    pass\n")) == [
        "function length: f: 71 lines, at most 70"
    ]


CPP = """\
// { a brace in a comment
#define OPEN {
namespace tcxl {
struct alignas(64) Row { int x = 0; };
constexpr char kBrace = '{';
template <typename T>
void Engine::commit(const struct stat& s, const char* name = "}}",
                    int n = 1'000) {
  auto f = [&](int i) { return i; };
BODY  }
}  // namespace tcxl
int after(int x) { return x; }
"""


def test_cpp_function_length(tidy: ModuleType) -> None:
    fits = CPP.replace("BODY", "  if (n) { g(); }\n" * 65)
    too_long = CPP.replace("BODY", "  if (n) { g(); }\n" * 66)
    assert list(tidy.check_cpp(fits)) == []
    assert list(tidy.check_cpp(too_long)) == [
        "function length: Engine::commit: 71 lines, at most 70"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "class PoolManager: ...\n",
        "def misc() -> None: ...\n",
        "def f(info: int) -> None: ...\n",
        "ulog = 1\n",
        "self.common = 2\n",
    ],
)
def test_banned_python_names(tidy: ModuleType, text: str) -> None:
    (finding,) = tidy.check_python(text)
    assert finding.startswith("banned name: ")


def test_names_of_others_may_be_used(tidy: ModuleType) -> None:
    text = "import sys\n\nversion = sys.version_info\nlow = torch.finfo(kind).min\n"
    assert list(tidy.check_python(text)) == []


def test_banned_cpp_and_file_names(tidy: ModuleType, checkout: Path) -> None:
    write(checkout, "csrc/utils.h", "struct LogManager { int x; };\n")
    write(checkout, "csrc/a.cc", '#include "utils.h"\n')
    assert report(tidy, checkout) == [
        "csrc/utils.h: banned name: utils.h",
        "csrc/utils.h: banned name: struct 'LogManager'",
    ]


def test_ascii_in_sources_only(tidy: ModuleType, checkout: Path) -> None:
    write(checkout, "tests/a.py", "# fine\nx = 'caf\u00e9'\n")
    write(checkout, "README.md", "caf\u00e9\n")
    assert report(tidy, checkout) == ["tests/a.py: ASCII: line 2 has '\u00e9'"]


def test_layout_constants_are_documented(tidy: ModuleType, checkout: Path) -> None:
    layout = "inline constexpr uint64_t kSlotBytes = 64;\nconstexpr std::size_t kRowAt = 0;\n"
    write(checkout, "csrc/layout.h", layout)
    write(checkout, "csrc/layout.cc", '#include "layout.h"\n')
    assert report(tidy, checkout) == [], "nothing to compare with before docs/format.md exists"
    write(checkout, "docs/format.md", "`kSlotBytes` and kRowAtEnd, of layout.h\n")
    write(checkout, "README.md", "docs/format.md\n")
    assert report(tidy, checkout) == [
        "csrc/layout.h: undocumented: kRowAt is not in docs/format.md"
    ]


def test_dead_files(tidy: ModuleType, checkout: Path) -> None:
    write(checkout, "tools/alive.sh", "true\n")
    write(checkout, "tools/dead.sh", "# dead\ntrue\n")
    write(checkout, "Makefile", "all:\n\tbash tools/alive.sh\n")
    assert report(tidy, checkout) == ["tools/dead.sh: dead file: no other file mentions it"]


def test_exceptions_cover_one_kind_of_one_file(
    tidy: ModuleType, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(checkout, "tests/a.py", "\n" * 501 + "ulog = 1\n")
    assert tidy.main(checkout) == 2
    monkeypatch.setattr(tidy, "EXCEPTIONS", {("tests/a.py", "file length"): "a reason"})
    assert tidy.main(checkout) == 1
