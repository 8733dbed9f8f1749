"""What is read off a kernel's machine code, and that no kernel keeps in memory what should be in registers."""

import pytest

from kernels import machine_code

COPY = """
.version 7.0
.target sm_80
.address_size 64
.visible .entry copy(.param .u64 to, .param .u64 from)
{
  .reg .b32 %r<5>; .reg .b64 %d<5>;
  LOCAL
  ld.param.u64 %d1, [to];
  ld.param.u64 %d2, [from];
  ld.global.v4.u32 {%r1, %r2, %r3, %r4}, [%d2];
  USE
  st.global.v4.u32 [%d1], {%r1, %r2, %r3, %r4};
  ret;
}
"""


@pytest.fixture(autouse=True)
def tools() -> None:
    for name in ("ptxas", "nvdisasm"):
        try:
            machine_code.tool(name)
        except FileNotFoundError as error:
            pytest.skip(str(error))


def test_registers_and_wide_accesses_are_counted() -> None:
    made = machine_code.assemble(COPY.replace("LOCAL", "").replace("USE", ""), (9, 0), "copy")
    assert (made.wide("LD"), made.wide("ST"), made.spills) == (1, 1, 0)
    assert 6 <= made.registers <= 32


def test_memory_of_a_thread_counts_as_spilled() -> None:
    """An array that is indexed at run time cannot be in registers."""
    use = "cvt.u64.u32 %d3, %r1; mov.u64 %d4, room; add.u64 %d3, %d3, %d4;"
    use += "st.local.u32 [%d3], %r2; ld.local.u32 %r3, [room];"
    ptx = COPY.replace("LOCAL", ".local .align 4 .b8 room[64];").replace("USE", use)
    assert machine_code.assemble(ptx, (8, 0), "copy").spills >= 64


def test_what_is_wrong_or_missing_is_named() -> None:
    with pytest.raises(FileNotFoundError, match="no_such_tool is not installed; nvidia-cuda-nvcc-cu12"):
        machine_code.tool("no_such_tool")
    with pytest.raises(RuntimeError, match="ptxas.*(?s:.*)syntax"):
        machine_code.assemble(COPY.replace("LOCAL", "nonsense nonsense").replace("USE", ""), (9, 0), "copy")


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_no_kernel_spills_and_blocks_fit(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("kernels.targets.cuda", reason="CUDA's compilers are missing", exc_type=ImportError)
    machine_code.main()
    header, line, *rows = capsys.readouterr().out.splitlines()
    assert header == "| kernel | sm_80 | sm_90 | sm_100 |" and line == "|---|---|---|---|"
    assert len(rows) > 15
    for row in rows:
        for cell in row.strip("| ").split(" | ")[1:]:
            registers, spilled, wide = cell.split(", ")
            assert int(registers) <= 128 and spilled == "0", row
            assert row.startswith("| quantize") or "0" not in wide.split("/"), row
