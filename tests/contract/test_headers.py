"""csrc/te_torch.h declares libtorch's C functions by itself; the installed torch's own headers must agree.

One C++ file includes both and asserts, for each function of the list, that the declared type is exactly ours.
Nothing is built or run, and no torch is imported: the compiler's front end is the judge.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.contract

ROOT = Path(__file__).resolve().parents[2]
OLDEST = (2, 11)  # the oldest torch that te_ops supports: TE_TORCH_ABI in te_torch.h

# When the functions of TE_TORCH_OPTIONAL_FUNCTIONS came. At an older target they must not be declared: a
# wrong row of this table fails in both directions.
OPTIONAL_SINCE = {
    "torch_exception_get_what_without_backtrace": (2, 13),
    "torch_new_stable_ivalue": (2, 13),
    "torch_delete_stable_ivalue": (2, 13),
}

SOURCE = """
#include <type_traits>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/c/shim.h>

#define TE_TORCH_TYPES_DECLARED /* torch's, from here on */
#include "te_torch.h"

#define SAME(ret, name, params) static_assert(std::is_same_v<decltype(&::name), ret(*) params>, #name);
TE_TORCH_FUNCTIONS(SAME)
TE_TORCH_CUDA_FUNCTIONS(SAME)

#define GETTER(id, name, size, getter) SAME(int32_t, getter, ())
TE_DTYPES(GETTER)

/* A name that torch does not declare is free to be something else. */
#define UNDECLARED(ret, name, params) extern "C" int name[7];
%(optional)s
#define OPTIONAL(ret, name, params) OPTIONAL_##name(ret, name, params)
TE_TORCH_OPTIONAL_FUNCTIONS(OPTIONAL)

static_assert(TE_TORCH_ABI == ((0ULL + %(oldest_major)d) << 56 | (0ULL + %(oldest_minor)d) << 48));
static_assert(std::is_same_v<StableIValue, uint64_t>); /* te_dispatch.h says uint64_t * */
"""


def installed_torch() -> tuple[int, int]:
    """From the package's metadata; "2.12.0a0+git1234" counts as 2.12."""
    major, minor = importlib.metadata.version("torch").split(".")[:2]
    return int(major), int(minor)


def torch_include() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "include"


@pytest.fixture(scope="module")
def compiler() -> str:
    wish = os.environ.get("CXX", "c++")
    found = shutil.which(wish)
    if found is None:
        pytest.skip(
            f"needs a C++17 compiler, but there is no '{wish}' on PATH; set CXX or install g++ or clang++"
        )
    if not (torch_include() / "torch/csrc/stable/c/shim.h").exists():
        pytest.skip(
            f"this torch comes without headers: no torch/csrc/stable/c/shim.h under {torch_include()}"
        )
    return found


def mutate(header: Path, folder: Path, old: str, new: str) -> None:
    """A copy of the header in `folder`, which check() searches first, with `old` replaced."""
    text = header.read_text()
    assert old == "" or text.count(old) == 1, f"{header.name} has changed: adapt this test to it ({old!r})"
    assert old == "" or old != new
    (folder / header.name).write_text(text.replace(old, new) if old else text)


def check(compiler: str, folder: Path, target: tuple[int, int]) -> str:
    """The compiler's complaints about the file; empty if all types agree."""
    judges = {name: "SAME" if target >= since else "UNDECLARED" for name, since in OPTIONAL_SINCE.items()}
    optional = "\n".join(f"#define OPTIONAL_{name} {judge}" for name, judge in judges.items())
    source = folder / "check.cpp"
    source.write_text(SOURCE % {"optional": optional, "oldest_major": OLDEST[0], "oldest_minor": OLDEST[1]})
    command = [compiler, "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-DUSE_CUDA"]
    command += [f"-DTORCH_TARGET_VERSION=0x{target[0] << 56 | target[1] << 48:016x}ULL"]
    command += [f"-I{folder}", f"-I{ROOT / 'csrc'}", f"-I{ROOT / 'python/te_ops/include'}"]
    command += ["-isystem", str(torch_include()), str(source)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (result.returncode == 0) == (result.stderr == ""), (
        f"{command} ended with {result.returncode}:\n{result.stderr}"
    )
    return result.stderr


def targets() -> list[tuple[int, int]]:
    """The headers of a newer torch can pose as an older one's. There they must still declare all that te_ops
    needs, and of the optional functions those that had come by then: so also look just before each came."""
    before = {(major, minor - 1) for major, minor in OPTIONAL_SINCE.values()}
    return sorted(
        v for v in {OLDEST, installed_torch(), *before, *OPTIONAL_SINCE.values()} if v <= installed_torch()
    )


@pytest.mark.parametrize("target", targets(), ids=lambda v: f"as-{v[0]}.{v[1]}")
def test_torchs_headers_declare_what_te_ops_declares(
    compiler: str, tmp_path: Path, target: tuple[int, int]
) -> None:
    complaints = check(compiler, tmp_path, target)
    assert not complaints, (
        f"te_torch.h and the headers of torch {importlib.metadata.version('torch')} differ:\n{complaints}"
    )


def test_every_optional_function_has_a_version() -> None:
    text = (ROOT / "csrc/te_torch.h").read_text()
    begin = text.index("#define TE_TORCH_OPTIONAL_FUNCTIONS(X)")
    macro = re.match(r"(?:.*\\\n)*.*\n", text[begin:])
    assert macro is not None
    names = re.findall(r"X\([^,]+,\s*(?:\\\n\s*)?(\w+),", macro[0])
    assert set(names) == set(OPTIONAL_SINCE), "give each a version in OPTIONAL_SINCE"


# Text of te_torch.h, what to replace in it, by what, and whom the compiler must name.
MISTAKES = {
    "parameter": (
        "aoti_torch_get_dim, (AtenTensorHandle, int64_t *)",
        "int64_t *",
        "int32_t *",
        "aoti_torch_get_dim",
    ),
    "constness": (
        "torch_get_const_data_ptr, (AtenTensorHandle, const void **)",
        "const ",
        "",
        "torch_get_const_data_ptr",
    ),
    "return type": ("X(void, aoti_torch_check,", "void", "AOTITorchError", "aoti_torch_check"),
    "too few": (
        "aoti_torch_copy_, (AtenTensorHandle, AtenTensorHandle, int32_t)",
        ", int32_t",
        "",
        "aoti_torch_copy_",
    ),
    "callback": (
        "typedef void te_boxed_fn(StableIValue *, uint64_t, uint64_t)",
        "uint64_t)",
        "int64_t)",
        "torch_library_impl",
    ),
    "CUDA": ("aoti_torch_create_cuda_guard, (int32_t,", "int32_t", "int64_t", "aoti_torch_create_cuda_guard"),
    "optional": ("torch_new_stable_ivalue, (StableIValue **)", "**", "*", "torch_new_stable_ivalue"),
    "no such": ("aoti_torch_get_layout,", "layout", "layouts", "aoti_torch_get_layouts"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_does_not_compile(compiler: str, tmp_path: Path, mistake: str) -> None:
    place, old, new, named = MISTAKES[mistake]
    if mistake == "optional" and installed_torch() < OPTIONAL_SINCE[named]:
        pytest.skip(
            "{} came with torch {}.{}: here nothing declares it".format(named, *OPTIONAL_SINCE[named])
        )
    mutate(ROOT / "csrc/te_torch.h", tmp_path, place, place.replace(old, new))
    complaints = check(compiler, tmp_path, installed_torch())
    assert named in complaints, f"a deliberate mistake was not noticed; the compiler said:\n{complaints}"


def test_a_getter_that_torch_does_not_have_does_not_compile(compiler: str, tmp_path: Path) -> None:
    mutate(ROOT / "csrc/te_torch.h", tmp_path, "", "")  # so that its includes are looked for in tmp_path
    header = ROOT / "python/te_ops/include/te_ops.h"
    mutate(header, tmp_path, "aoti_torch_dtype_bfloat16)", "aoti_torch_dtype_bf16)")
    assert "aoti_torch_dtype_bf16" in check(compiler, tmp_path, installed_torch())


@pytest.mark.skipif(installed_torch() < (2, 13), reason="needs a torch that has a function the table dates")
def test_a_wrong_version_does_not_compile(
    compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "torch_new_stable_ivalue"
    since = OPTIONAL_SINCE[name]
    before = (since[0], since[1] - 1)
    monkeypatch.setitem(OPTIONAL_SINCE, name, before)  # too early: there is no such function yet
    assert name in check(compiler, tmp_path, before)
    monkeypatch.setitem(OPTIONAL_SINCE, name, (since[0], since[1] + 1))  # too late: it is declared already
    assert name in check(compiler, tmp_path, since)
