"""Stand-ins for GPU packages: importable, subclassable, and loud when really used."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tools.cpu_engine.environment import SITE_DIRECTORY


def run_with_site(source: str) -> str:
    """Output of `source` in a fresh interpreter that has the stand-ins, as CPU engines do."""
    program = f"import sys; sys.path.insert(0, {str(SITE_DIRECTORY)!r})\n" + textwrap.dedent(source)
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_kernels_can_be_defined_but_not_launched() -> None:
    output = run_with_site(
        """
        import triton
        import triton.language as tl
        from triton.language.extra import libdevice

        @triton.autotune(configs=[triton.Config({"B": 1}, num_warps=4)], key=["n"])
        @triton.heuristics({"EVEN": lambda args: True})
        @triton.jit
        def kernel(pointer, n: tl.constexpr, B: tl.constexpr = tl.constexpr(2)):
            pass

        for launch in (lambda: kernel[(1,)](0, 1), lambda: kernel(0, 1)):
            try:
                launch()
            except NotImplementedError as error:
                print(error)
        print(triton.cdiv(7, 2), triton.next_power_of_2(5), tl.constexpr(3))
        """
    )
    first, second, helpers = output.splitlines()
    assert first == second
    assert first.startswith("kernel was reached on a CPU engine")
    assert helpers == "4 8 3"


def test_asking_for_the_device_fails_as_without_a_gpu() -> None:
    output = run_with_site(
        """
        import triton
        try:
            triton.runtime.driver.active.get_current_target()
        except NotImplementedError as error:
            print(error)
        """
    )
    assert "triton.runtime.driver.active" in output


def test_any_submodule_and_name_can_be_imported() -> None:
    output = run_with_site(
        """
        import torchvision.transforms.v2.functional as F
        from torchvision.transforms import InterpolationMode
        from sgl_kernel import rmsnorm
        import sgl_kernel.deep.er

        class Mine(InterpolationMode):
            pass

        table = {InterpolationMode.BICUBIC: 1}
        for call in (lambda: rmsnorm(1, 2), lambda: F.resize(0, size=1)):
            try:
                call()
            except NotImplementedError as error:
                print(error)
        """
    )
    assert output.splitlines()[0].startswith("sgl_kernel.rmsnorm was reached")
    assert output.splitlines()[1].startswith("torchvision.transforms.v2.functional.resize was")
