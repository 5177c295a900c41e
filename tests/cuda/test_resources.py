"""The committed table of kernel resources: current, without spills; recompiled where nvcc is at hand."""

import shutil

import machine_code
import pytest
import resources

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc was not found")
needs_cuobjdump = pytest.mark.skipif(
    resources.find_cuobjdump() is None, reason="cuobjdump and nvdisasm were not found"
)
HOPPER = [path for path in resources.sources() if path.name.startswith("sm90_")]


@pytest.fixture(scope="module")
def committed():
    return resources.read_table()[1]


@pytest.fixture(scope="module")
def hopper_reports():
    return {source: resources.compile_report(source, ("90a",)) for source in HOPPER}


def check_machine_code(kernels):
    """Every product of the Hopper files multiplies by warpgroups and loads by TMA."""
    products = [kernel for kernel in kernels if not kernel.name.startswith("sum_dots_kernel")]
    assert products
    for kernel in products:
        assert kernel.instructions > 0, kernel
        assert kernel.hgmma > 0, kernel
        assert kernel.utmaldg > 0, kernel


def test_table_is_current():
    digest, _ = resources.read_table()
    assert digest == resources.digest(), (
        "sources changed: run python tests/cuda/resources.py and commit the table"
    )


def test_kernels_do_not_spill(committed):
    assert {kernel.file for kernel in committed} == {path.name for path in resources.sources()}
    for kernel in committed:
        assert kernel.spills == 0, kernel
        assert kernel.stack == 0, kernel
        assert kernel.registers <= 255, kernel


def test_committed_machine_code(committed):
    hopper = [
        kernel for kernel in committed if kernel.file.startswith("sm90_") and kernel.architecture == "90a"
    ]
    assert {kernel.file for kernel in hopper} == {path.name for path in HOPPER}
    check_machine_code(hopper)
    assert all(kernel.instructions > 0 and kernel.hgmma == 0 for kernel in committed if kernel not in hopper)


@pytest.mark.slow
@needs_nvcc
def test_hopper_kernels_compile_as_the_table_says(committed, hopper_reports):
    """Their speed hangs on registers. test_table_is_current sees every change of a source, without nvcc."""
    for source, report in hopper_reports.items():
        assert "serializ" not in report.ptxas, report.ptxas
        expected = [
            kernel for kernel in committed if (kernel.file, kernel.architecture) == (source.name, "90a")
        ]
        found = resources.kernels_of(source, report)
        assert [kernel.as_ptxas_says() for kernel in found] == [kernel.as_ptxas_says() for kernel in expected]


@pytest.mark.slow
@needs_nvcc
@needs_cuobjdump
def test_hopper_machine_code(hopper_reports):
    for source, report in hopper_reports.items():
        check_machine_code(resources.kernels_of(source, report))


@pytest.mark.slow
@needs_nvcc
@needs_cuobjdump
def test_hopper_main_loops(hopper_reports):
    """Of every product: a loop that multiplies, that fences no more than the block, and whose descriptors are known
    to be uniform; staged results are read as shared memory."""
    for source, report in hopper_reports.items():
        for (name, _), instructions in machine_code.functions(report.code).items():
            if "sum_dots_kernel" in name:
                continue
            loops = machine_code.main_loops(instructions)
            assert loops, (source.name, name)
            for loop in loops:
                assert loop.hgmma in (4, 8, 16), (name, loop)  # of one step, or of two
                assert loop.gpu_fences == 0, (name, loop)
                assert loop.r2ur <= (4 if loop.hgmma == 4 else 6), (name, loop)
                assert loop.instructions - loop.hgmma <= 128, (name, loop)
            assert machine_code.generic_wide_loads(instructions) == 0, name


CODE = """
arch = sm_90a
\t\tFunction : k
        /*0000*/                   LDS.128 R4, [R2] ;
        /*0010*/                   LD.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/                   R2UR UR4, R4 ;
        /*0040*/                   HGMMA.64x192x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0050*/                   MEMBAR.ALL.GPU ;
        /*0060*/                   SYNCS.ARRIVE.TRANS64.RED.A1T0 RZ, [R3+URZ], RZ ;
        /*0070*/              @!P0 BRA 0x30 ;
        /*0080*/                   EXIT ;
        /*0090*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R3], R4 ;
        /*00a0*/              @!P0 BRA 0x0090 ;
        /*00b0*/                   BRA 0x40 ;
"""


def test_machine_code_is_read_as_meant():
    (instructions,) = machine_code.functions(CODE).values()
    assert machine_code.generic_wide_loads(instructions) == 1
    assert machine_code.main_loops(instructions) == [machine_code.Loop(5, 1, 1, 0, 1)]


@needs_nvcc
@needs_cuobjdump
@pytest.mark.slow
def test_whole_table(committed):
    assert resources.all_kernels() == committed
