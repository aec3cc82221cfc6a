"""Builds te_ops._C: cc for .c, nvcc for .cu where one is found, one abi3 file that needs no torch to build.

Environment: TE_OPS_CUDA=0|1 forces a build without or with CUDA code; TE_OPS_CUDA_ARCHS="9.0a" narrows
the architectures; TE_OPS_SANITIZE=1 adds AddressSanitizer and UBSan; CC and CUDA_HOME as usual.
"""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
DEFAULT_CUDA_ARCHS = "8.0 8.9 9.0a 10.0a 12.0a"
MIN_NVCC = (12, 8)
C_FLAGS = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-fexceptions"]
WARNINGS = ["-Wall", "-Wextra", "-Werror"]


def say(message: str) -> None:
    print(f"te_ops: {message}", flush=True)


class Cuda:
    """A CUDA toolkit: nvcc of at least 12.8, its headers and the static runtime."""

    def __init__(self, nvcc: Path, version: tuple[int, int]) -> None:
        self.nvcc, self.version = nvcc, version
        home = nvcc.resolve().parent.parent
        self.include = self._find(home, ["include", "targets/*/include"], "cuda_runtime_api.h")
        self.cublas_include = self._find(home, ["include", "targets/*/include"], "cublasLt.h")
        self.lib = self._find(home, ["lib64", "lib", "targets/*/lib"], "libcudart_static.a")

    @staticmethod
    def _find(home: Path, places: list[str], name: str) -> Path:
        for place in places:
            for folder in glob.glob(str(home / place)):
                if (Path(folder) / name).exists():
                    return Path(folder)
        raise RuntimeError(
            f"nvcc was found, but no {name} under {home}: install the CUDA toolkit, or "
            "pip install nvidia-cuda-runtime nvidia-cublas nvidia-cuda-crt nvidia-nvvm nvidia-cuda-cccl"
        )

    @staticmethod
    def candidates() -> list[Path]:
        found = []
        if home := os.environ.get("CUDA_HOME"):
            found.append(Path(home) / "bin" / "nvcc")
        if on_path := shutil.which("nvcc"):
            found.append(Path(on_path))
        if (spec := importlib.util.find_spec("nvidia")) and spec.submodule_search_locations:
            for folder in spec.submodule_search_locations:
                found += [Path(p) for p in sorted(glob.glob(f"{folder}/cu*/bin/nvcc"), reverse=True)]
        return found + [Path("/usr/local/cuda/bin/nvcc")]

    @classmethod
    def find(cls) -> Cuda | None:
        wish = os.environ.get("TE_OPS_CUDA")
        if wish not in (None, "", "0", "1"):
            raise RuntimeError(f"TE_OPS_CUDA={wish}: must be 0 or 1")
        if wish == "0":
            say("building without CUDA code, since TE_OPS_CUDA=0")
            return None
        seen = []
        for nvcc in cls.candidates():
            if not nvcc.exists():
                continue
            text = subprocess.run(
                [str(nvcc), "--version"], capture_output=True, text=True, check=False
            ).stdout
            match = re.search(r"release (\d+)\.(\d+)", text)
            version = (int(match[1]), int(match[2])) if match else (0, 0)
            if version < MIN_NVCC:
                seen.append(f"{nvcc} is {version[0]}.{version[1]}")
                continue
            try:
                cuda = cls(nvcc, version)
            except RuntimeError as error:
                seen.append(str(error))
                continue
            say(f"building with CUDA code by {nvcc} ({version[0]}.{version[1]})")
            return cuda
        reason = (
            "; ".join(seen) or "no nvcc in CUDA_HOME, PATH, the nvidia-cuda-nvcc wheel or /usr/local/cuda"
        )
        if wish == "1":
            raise RuntimeError(
                f"TE_OPS_CUDA=1, but no nvcc >= {MIN_NVCC[0]}.{MIN_NVCC[1]} is usable: {reason}"
            )
        say(f"building a CPU-only te_ops: {reason}")
        return None

    @property
    def archs(self) -> list[str]:
        archs = (
            (os.environ.get("TE_OPS_CUDA_ARCHS") or DEFAULT_CUDA_ARCHS)
            .replace(";", " ")
            .replace(",", " ")
            .split()
        )
        for arch in archs:
            if not re.fullmatch(r"\d+\.\d[af]?", arch):
                raise RuntimeError(f"TE_OPS_CUDA_ARCHS: {arch!r} is not like 8.0 or 9.0a")
        return archs

    def gencode(self) -> list[str]:
        """Machine code for each architecture, and PTX of the last generic one for GPUs to come."""
        names = [arch.replace(".", "") for arch in self.archs]
        flags = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in names]
        if generic := [n for n in names if n.isdigit()]:
            flags.append(f"-gencode=arch=compute_{generic[-1]},code=compute_{generic[-1]}")
        return flags


class BuildExt(build_ext):
    """One object a source, in parallel, rebuilt when its command or any file it may include has changed."""

    def build_extension(self, ext: Extension) -> None:
        cuda = Cuda.find()
        temp = Path(self.build_temp) / ("cuda" if cuda else "cpu")
        sanitize = os.environ.get("TE_OPS_SANITIZE") == "1"
        if sanitize:
            temp = temp.with_name(temp.name + "-sanitize")
        temp.mkdir(parents=True, exist_ok=True)
        cc = shlex.split(os.environ.get("CC", "cc"))
        sanitizers = (
            ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-O1"] if sanitize else []
        )
        defines = [f'-DTE_CUDA_BUILD="{".".join(map(str, cuda.version))}"' if cuda else '-DTE_CUDA_BUILD=""']
        defines += [f'-DTE_CUDA_ARCHS="{" ".join(cuda.archs)}"' if cuda else '-DTE_CUDA_ARCHS=""']
        includes = ["-Ipython/te_ops/include", *(f"-I{folder}" for folder in self.include_dirs)]
        if cuda:
            defines.append("-DTE_WITH_CUDA=1")
            includes += [f"-isystem{cuda.include}", f"-isystem{cuda.cublas_include}"]
        c_command = [*cc, *C_FLAGS, *WARNINGS, *sanitizers, *defines, *includes]
        self.check_table(c_command, temp)

        sources = sorted(glob.glob("csrc/te_*.c") + glob.glob("csrc/fp8/*.c") + glob.glob("csrc/cpu/*.c"))
        sources.remove("csrc/te_check.c")
        commands = {source: [*c_command, "-c", source] for source in sources}
        if cuda:
            commands |= {source: [*c_command, "-c", source] for source in sorted(glob.glob("csrc/cuda/*.c"))}
            host_flags = "-fPIC,-fvisibility=hidden,-Wall"
            nvcc = [str(cuda.nvcc), "-std=c++17", "-O3", "-lineinfo", "-Ipython/te_ops/include",
                    *cuda.gencode(), "-Xcompiler", host_flags, "-Werror", "all-warnings"]  # fmt: skip
            commands |= {source: [*nvcc, "-c", source] for source in sorted(glob.glob("csrc/kernels/*.cu"))}
        headers = glob.glob("csrc/**/*.*h", recursive=True) + ["csrc/te_ops.def"]
        headers += glob.glob("python/te_ops/include/*.h")
        newest_header = max(Path(p).stat().st_mtime for p in headers)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(lambda s: self.compile(s, commands[s], temp, newest_header), commands))

        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        link = [*cc, "-shared", *sanitizers, "-o", str(output), *objects, "-ldl", "-lpthread"]
        if cuda:
            link += [
                f"-L{cuda.lib}",
                "-lcudart_static",
                "-lrt",
                "-lstdc++",
            ]  # the static runtime is C++ inside
        self.run_command_line(link)

    def check_table(self, c_command: list[str], temp: Path) -> None:
        """Parses every row of csrc/te_ops.def, so that a malformed one fails here and not at a user's run."""
        check = temp / "te_check"
        stems = ("check", "table", "parse", "slots", "schema", "dtype", "dims", "status")
        sources = [f"csrc/te_{stem}.c" for stem in stems]
        self.run_command_line([*c_command, "-DTE_ROWS_ONLY", *sources, "-o", str(check)])
        self.run_command_line([str(check)])

    def compile(self, source: str, command: list[str], temp: Path, newest_header: float) -> str:
        target = temp / (source.replace("/", "_") + ".o")
        record = target.with_suffix(".cmd")
        command = [*command, "-o", str(target)]
        fresh = target.exists() and record.exists() and record.read_text() == shlex.join(command)
        if not fresh or target.stat().st_mtime < max(newest_header, Path(source).stat().st_mtime):
            self.run_command_line(command)
            record.write_text(shlex.join(command))
        return str(target)

    def run_command_line(self, command: list[str]) -> None:
        if os.environ.get("TE_OPS_VERBOSE"):
            say(shlex.join(command))
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


os.chdir(ROOT)
if sys.platform != "linux":
    raise RuntimeError("te_ops builds on Linux")
setup(
    ext_modules=[Extension("te_ops._C", sources=[], py_limited_api=True)],
    cmdclass={"build_ext": BuildExt},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
