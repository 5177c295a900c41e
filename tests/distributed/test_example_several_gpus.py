"""examples/several_gpus.py with --cpu: one curve on any number of ranks, and after a restart on another number."""

import re

import pytest

from tests.pages import ROOT, run_shell


def losses(ranks, folder, capfd, *options):
    program = ROOT / "examples/several_gpus.py"
    capfd.readouterr()
    run_shell(
        f"torchrun --standalone --nproc-per-node {ranks} {program} --cpu --save-every 20 {' '.join(options)}",
        folder,
    )
    found = re.findall(r"step (\d+): loss ([\d.]+)", capfd.readouterr().out)
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.long
def test_curve_is_that_of_one_process_also_after_a_restart(tmp_path, capfd):
    one = losses(1, tmp_path, capfd, "--steps 40 --out one")
    assert one.keys() == {20, 40} and one[40] < one[20] < 4.3
    begun = losses(2, tmp_path, capfd, "--steps 20 --out two")
    went_on = losses(4, tmp_path, capfd, "--steps 40 --out two --resume")
    assert begun | went_on == pytest.approx(one, abs=1e-3)
