"""Compilers for other processors accept the CPU kernels. Their results there are not checked."""

import platform
import shutil
import subprocess

import pytest

from granite4_neuron.devices.cpu import build

X86 = "c++"
ARM = "aarch64-linux-gnu-g++"
VECTORS = ("float", "at::BFloat16", "at::Half")


@pytest.mark.slow
@pytest.mark.parametrize(
    "compiler, processor, capability",
    [
        pytest.param(X86, ("-march=x86-64-v3",), "AVX2", marks=pytest.mark.exhaustive, id="AVX2"),
        pytest.param(
            X86, ("-march=skylake-avx512",), "AVX512", marks=pytest.mark.exhaustive, id="AVX-512 without bfloat16"
        ),
        pytest.param(X86, ("-march=cooperlake",), "AVX512", marks=pytest.mark.exhaustive, id="AVX-512 with bfloat16"),
        pytest.param(
            X86,
            ("-march=sapphirerapids",),
            "AVX512",
            marks=pytest.mark.exhaustive,
            id="AVX-512 with permutations of bytes",
        ),
        pytest.param(X86, ("-march=sapphirerapids", "-DGRANITE4_AMX"), "AVX512", id="AMX"),
        pytest.param(X86, ("-march=x86-64",), "DEFAULT", marks=pytest.mark.exhaustive, id="x86 without AVX"),
        pytest.param(ARM, ("-march=armv8-a",), "DEFAULT", id="Arm"),
    ],
)
def test_the_kernels_compile_for_other_processors(compiler, processor, capability, tmp_path):
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")
    if compiler == X86 and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("c++ compiles for this processor, which is no x86")
    flags = [flag for flag in build._FLAGS if not flag.startswith("-O")]
    defines = [f"-DCPU_CAPABILITY={capability}", f"-DCPU_CAPABILITY_{capability}"]
    command = [
        compiler,
        "-fsyntax-only",
        *flags,
        *build._QUIET,
        *processor,
        *defines,
        f"-isystem{build._TORCH / 'include'}",
    ]
    command += [*build._including_formats(build._SOURCES, tmp_path), "-DGRANITE4_FORMAT=plain", "-xc++", "-"]
    units = "".join(f'#include "{source}"\n' for source in sorted(build._SOURCES.glob("*.cpp")))
    # The products of every format: each has a library of its own.
    for name in build.formats():
        products = "".join(f"set_products<{name}::Tiles, {each}>(Format::{name});" for each in VECTORS)
        units += f"namespace granite4_neuron {{ void set_{name}() {{ {products} }} }}\n"
    done = subprocess.run(command, input=units, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
