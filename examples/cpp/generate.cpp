// Continues a text with a model that train.cpp or Python has saved: generate FOLDER PROMPT [BYTES].
#include <cstdio>
#include <string>

#include "model.h"

namespace {

constexpr int64_t kContext = 128;
constexpr double kTemperature = 0.8;

void generate(const std::string& folder, const std::string& prompt, int64_t num_bytes) {
  torch::NoGradGuard no_grad;
  auto model = std::make_shared<LanguageModel>();
  fmoe::load(folder, *model);
  model->eval();
  TORCH_CHECK(!prompt.empty(), "the prompt must have a byte or more");
  Tensor tokens = torch::empty({1, static_cast<int64_t>(prompt.size())}, torch::kLong);
  for (size_t i = 0; i < prompt.size(); ++i)
    tokens[0][static_cast<int64_t>(i)] = static_cast<uint8_t>(prompt[i]);
  auto generator = at::detail::createCPUGenerator(0);
  std::fputs(prompt.c_str(), stdout);
  for (int64_t i = 0; i < num_bytes; ++i) {
    const Tensor seen = tokens.slice(1, std::max<int64_t>(0, tokens.size(1) - kContext));
    const Tensor logits = model->forward(seen)[0][-1];
    const Tensor chosen = torch::multinomial((logits / kTemperature).softmax(-1), 1, false, generator);
    std::putchar(static_cast<int>(chosen.item<int64_t>()));
    std::fflush(stdout);
    tokens = torch::cat({tokens, chosen.unsqueeze(0)}, 1);
  }
  std::putchar('\n');
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "generate FOLDER PROMPT [BYTES]\n");
    return 2;
  }
  try {
    generate(argv[1], argv[2], argc > 3 ? std::stoll(argv[3]) : 300);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "generate: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "generate: %s\n", error.what());
    return 1;
  }
  return 0;
}
