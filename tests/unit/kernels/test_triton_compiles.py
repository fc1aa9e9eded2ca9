"""The Triton kernels compile for an H100 (sm_90a) on a machine without one: registers, spills.

It shows that they compile and fit, not that they are fast.
"""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from dynamo_megatron.kernels import triton_engine, triton_kernels  # noqa: E402

POINTERS = {
    "z_ptr": "*bf16",
    "grad_ptr": "*bf16",
    "y_ptr": "*i64",
    "inv_ptr": "*fp64",
}
MAX_REGISTERS = 128


def _ptx(kernel, constants, warps):
    """PTX as the launcher would get it: aligned pointers, row sizes divisible by 16."""
    signature, attributes = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, "*fp32")
        else:
            signature[name] = "i32"
        if name.endswith("_ptr") or name == "width":
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": warps, **triton_engine.OPTIONS},
    )
    return compiled.asm["ptx"]


def _assemble(ptx, folder):
    """(registers, spilled bytes) by the newest bundled assembler: older ones refuse this PTX."""
    binaries = Path(triton.__file__).parent / "backends/nvidia/bin"
    assembler = next(
        (binaries / name for name in ("ptxas-blackwell", "ptxas") if (binaries / name).exists()),
        None,
    )
    if assembler is None:
        pytest.skip(f"this Triton bundles no ptxas in {binaries}")
    (folder / "kernel.ptx").write_text(ptx)
    done = subprocess.run(
        [assembler, "-v", "--gpu-name=sm_90a", folder / "kernel.ptx", "-o", "/dev/null"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    registers = int(re.search(r"Used (\d+) registers", done.stderr).group(1))
    spilled = sum(int(n) for n in re.findall(r"(\d+) bytes spill", done.stderr))
    return registers, spilled


@pytest.mark.slow
@pytest.mark.parametrize(("block", "warps"), [(1024, 4), (2048, 4), (4096, 8), (8192, 16)])
@pytest.mark.parametrize("need_q", [True, False])
def test_forward_kernel_fits_the_registers_of_sm_90a(block, warps, need_q, tmp_path):
    constants = {"BLOCK": block, "NEED_Q": need_q}
    ptx = _ptx(triton_kernels.partials_kernel, constants, warps)
    registers, spilled = _assemble(ptx, tmp_path)
    print(f"partials {block}/{warps} q={need_q}: {registers} registers")
    assert spilled == 0
    assert registers <= MAX_REGISTERS
    # 16-byte loads of the logits and one hardware exponential a column, nothing slower.
    assert re.search(r"ld\.global[^;]*\.v4", ptx)
    assert "ex2.approx" in ptx


@pytest.mark.slow
@pytest.mark.parametrize("has_k", [True, False])
@pytest.mark.parametrize(("block", "warps"), [(1024, 4), (4096, 8), (8192, 8)])
def test_gradient_kernel_fits_the_registers_of_sm_90a(block, warps, has_k, tmp_path):
    constants = {"BLOCK": block, "HAS_G": True, "HAS_K": has_k}
    ptx = _ptx(triton_kernels.gradient_kernel, constants, warps)
    registers, spilled = _assemble(ptx, tmp_path)
    print(f"gradient {block}/{warps} k={has_k}: {registers} registers")
    assert spilled == 0
    assert registers <= MAX_REGISTERS
    assert re.search(r"st\.global[^;]*\.v4", ptx)


@pytest.mark.slow
@pytest.mark.parametrize("need_q", [True, False])
def test_finish_kernel_fits_the_registers_of_sm_90a(need_q, tmp_path):
    constants = {"BLOCK": 128, "NEED_Q": need_q}
    registers, spilled = _assemble(_ptx(triton_kernels.finish_kernel, constants, 4), tmp_path)
    print(f"finish q={need_q}: {registers} registers")
    assert spilled == 0
    assert registers <= MAX_REGISTERS
