"""Compile a model with our layers to a package that serve.cpp runs without Python: export.py OUT.

Written to OUT: model.pt2 (AOTInductor), and example.safetensors with an input and the result that Python has.
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

import fmoe_ext


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.mlp = fmoe_ext.FMoETransformerMLP(8, 32, 64, "swiglu", gate="softmax")

    def forward(self, x):
        return x + self.mlp(self.norm(x))


def main(out):
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = Model().eval()
    x = torch.randn(6, 32)
    with torch.no_grad():
        exported = torch.export.export(
            model, (x,), dynamic_shapes=({0: torch.export.Dim("tokens", min=2, max=4096)},)
        )
        torch._inductor.aoti_compile_and_package(exported, package_path=str(out / "model.pt2"))
        save_file({"x": x, "y": model(x)}, out / "example.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
