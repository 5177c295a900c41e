// Runs a package that export.py has compiled, without Python: serve OUT.
#include <cstdio>
#include <string>

#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <fmoe/safetensors.h>

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "serve OUT\n");
    return 2;
  }
  try {
    torch::NoGradGuard no_grad;
    const std::string folder = argv[1];
    const fmoe::StateDict example = fmoe::read_safetensors(folder + "/example.safetensors");
    torch::inductor::AOTIModelPackageLoader model(folder + "/model.pt2");
    const auto y = model.run({example.at("x")})[0];
    const auto error = (y - example.at("y")).abs().max().item<double>();
    std::printf("%ld tokens; largest difference from Python: %g\n", static_cast<long>(y.size(0)), error);
    return error < 1e-5 ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "serve: %s\n", error.what());
    return 1;
  }
}
