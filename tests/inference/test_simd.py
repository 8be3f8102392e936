"""The vector instructions that the kernels are compiled for, and the variable that restricts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import llvmlite.binding as llvm
import pytest

from lightning_hmm.inference.kernels import simd

# Runs `simd.py` alone, because importing the package takes seconds. Prints the detected instructions and the registers
# that a compiled row operation uses.
PROGRAM = """
import json, runpy, sys
import numba, numpy as np

if "early" in sys.argv:
    numba.njit(lambda x: x)(1)
simd = runpy.run_path(sys.argv[1])
add = simd["accumulate_row"]

@numba.njit
def accumulate(total, row, weight):
    add(row[0], row.size, total.ctypes.data, row.ctypes.data, weight)

total = np.ones(16)
accumulate(total, np.full(16, 3.0), 2.0)
assert (total == 7).all()
code = "".join(accumulate.inspect_asm().values())
key = numba.core.registry.cpu_target.target_context.codegen().magic_tuple()
print(json.dumps([simd["VECTOR_BYTES"], [name for name in ("ymm", "zmm") if name in code], key]))
"""


def run(*options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "LIGHTNING_HMM_SIMD" and not name.startswith("NUMBA_")
    }
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, simd.__file__, *options],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=False,
    )


def found(**variables: str) -> list:
    done = run(**variables)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def has(feature: str) -> bool:
    return bool(llvm.get_host_cpu_features().get(feature))


def test_without_avx():
    size, registers, key = found(LIGHTNING_HMM_SIMD="generic")
    assert (size, registers, key[1:]) == (32, [], ["generic", ""])


@pytest.mark.skipif(not has("avx2"), reason="needs AVX2")
def test_avx2():
    size, registers, key = found(LIGHTNING_HMM_SIMD="avx2")
    assert (size, registers) == (32, ["ymm"])
    assert "+avx2" in key[2]
    assert "avx512" not in key[2]


@pytest.mark.skipif(not has("avx512f"), reason="needs AVX-512")
def test_avx512_is_the_default_where_there_is_any():
    size, registers, key = found(LIGHTNING_HMM_SIMD="avx512")
    assert size == 64
    assert "zmm" in registers
    assert found() == found(LIGHTNING_HMM_SIMD="") == [size, registers, key]


def test_the_width_follows_the_features_that_numba_compiles_for():
    """They are in the key of numba's cache, so that no code with another width is loaded."""
    assert found(NUMBA_CPU_NAME="generic")[0] == 32


def test_another_value_is_refused():
    done = run(LIGHTNING_HMM_SIMD="sse")
    assert done.returncode
    assert "`LIGHTNING_HMM_SIMD` must be avx512, avx2 or generic, but is 'sse' instead." in done.stderr


@pytest.mark.parametrize(
    ("name", "features", "lacking"),
    [("avx512", {"avx512f": False}, "avx512f"), ("avx2", {"avx2": True, "fma": False}, "bmi, bmi2, f16c, fma")],
)
def test_instructions_that_the_processor_lacks_are_refused(name, features, lacking):
    with pytest.raises(
        ValueError,
        match=f"`LIGHTNING_HMM_SIMD` .* but is '{name}', and this processor lacks {lacking}.* Use 'generic', or unset",
    ):
        simd._forced_target(name, features)
    assert simd._forced_target("generic", features) == ("generic", "")


def test_too_late_a_choice_is_refused():
    """numba decides what to compile for when it is first used, once in a process."""
    if llvm.get_process_triple().startswith("x86_64"):
        done = run("early", LIGHTNING_HMM_SIMD="generic")
        assert (
            "numba was set up for other instructions before lightning_hmm was imported. Import lightning_hmm first."
            in done.stderr
        )
