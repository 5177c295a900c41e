// Trains a language model with mixtures of experts in C++: train TEXT OUT [STEPS].
//
// Written to OUT: curve.csv (step, loss, balance loss), step-N/ with model.safetensors and
// optimizer.safetensors, which run.py, the caller, resumes in Python. The newest checkpoint in OUT of at
// most STEPS is resumed; it must be of a run with as many STEPS, by which the learning rate falls.
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numbers>
#include <string>

#include "model.h"

namespace {

namespace fs = std::filesystem;
constexpr int64_t kBatch = 16, kSeqLen = 128, kSaveEvery = 50, kWarmup = 20;
constexpr double kPeakRate = 1e-2, kBeta1 = 0.9, kBeta2 = 0.95, kEps = 1e-8, kDecay = 0.1,
                 kBalanceWeight = 0.03;

// torch.optim.AdamW, in the order in which it computes.
class AdamW {
 public:
  explicit AdamW(LanguageModel& model) {
    for (const auto& entry : model.named_parameters()) {
      params_.emplace_back(entry.key(), entry.value());
      state_["exp_avg." + entry.key()] = torch::zeros_like(entry.value());
      state_["exp_avg_sq." + entry.key()] = torch::zeros_like(entry.value());
    }
  }

  void step(int64_t number, double rate) {
    torch::NoGradGuard no_grad;
    const auto t = static_cast<double>(number);
    const double correction1 = 1 - std::pow(kBeta1, t), root2 = std::pow(1 - std::pow(kBeta2, t), 0.5);
    for (auto& [name, param] : params_) {
      Tensor &mean = state_["exp_avg." + name], &square = state_["exp_avg_sq." + name];
      const Tensor grad = param.grad();
      param.mul_(1 - rate * kDecay);
      mean.lerp_(grad, 1 - kBeta1);
      square.mul_(kBeta2).addcmul_(grad, grad, 1 - kBeta2);
      param.addcdiv_(mean, (square.sqrt() / root2).add_(kEps), -(rate / correction1));
      param.mutable_grad().reset();
    }
  }

  const fmoe::StateDict& state() const { return state_; }
  void load(const std::string& path) {
    fmoe::StateDict given = fmoe::read_safetensors(path);
    for (auto& [name, value] : state_) value.copy_(given.at(name));
  }

 private:
  std::vector<std::pair<std::string, Tensor>> params_;
  fmoe::StateDict state_;
};

// Linear warm-up, then a cosine to zero.
double learning_rate(int64_t step, int64_t steps) {
  if (step <= kWarmup) return kPeakRate * static_cast<double>(step) / kWarmup;
  const double done =
      static_cast<double>(step - kWarmup) / static_cast<double>(std::max<int64_t>(steps - kWarmup, 1));
  return kPeakRate * 0.5 * (1 + std::cos(std::numbers::pi * done));
}

Tensor read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string bytes{std::istreambuf_iterator<char>(file), {}};
  TORCH_CHECK(static_cast<int64_t>(bytes.size()) > kSeqLen, path, " has no ", kSeqLen + 1, " bytes of text");
  return torch::from_blob(bytes.data(), {static_cast<int64_t>(bytes.size())}, torch::kByte).clone();
}

// Windows [B, S + 1] of a step, a function of its number alone; as Corpus.batch in examples/lm/data.py.
Tensor batch(const Tensor& text, int64_t step) {
  auto generator = at::detail::createCPUGenerator(static_cast<uint64_t>(step));
  const Tensor start = torch::randint(0, text.size(0) - kSeqLen, {kBatch, 1}, generator, torch::kLong);
  return text.index({start + torch::arange(kSeqLen + 1)}).to(torch::kLong);
}

void save(const fs::path& folder, LanguageModel& model, const AdamW& optimizer) {
  const fs::path unfinished = folder.string() + ".tmp";
  fs::remove_all(unfinished);
  fmoe::save(unfinished.string(), model);
  fmoe::write_safetensors((unfinished / "optimizer.safetensors").string(), optimizer.state());
  fs::remove_all(folder);
  fs::rename(unfinished, folder);
}

fs::path folder_of(const fs::path& out, int64_t step) { return out / ("step-" + std::to_string(step)); }

// Loads the newest checkpoint and cuts the curve behind it -> its step.
int64_t resume(const fs::path& out, int64_t steps, LanguageModel& model, AdamW& optimizer) {
  int64_t step = steps;
  while (step > 0 && !fs::exists(folder_of(out, step))) --step;
  if (step > 0) {
    fmoe::load(folder_of(out, step).string(), model);
    optimizer.load((folder_of(out, step) / "optimizer.safetensors").string());
  }
  std::ifstream old(out / "curve.csv");
  std::string line, kept = "step,loss,balance_loss\n";
  std::getline(old, line);
  while (std::getline(old, line) && std::stoll(line) <= step) kept += line + "\n";
  std::ofstream(out / "curve.csv") << kept;
  return step;
}

void train(const std::string& text_path, const fs::path& out, int64_t steps) {
  torch::manual_seed(0);
  auto model = std::make_shared<LanguageModel>();
  AdamW optimizer(*model);
  const Tensor text = read_text(text_path);
  fs::create_directories(out);
  const int64_t begin = resume(out, steps, *model, optimizer);
  if (begin == 0) save(folder_of(out, 0), *model, optimizer);
  std::ofstream curve(out / "curve.csv", std::ios::app);
  for (int64_t step = begin + 1; step <= steps; ++step) {
    const Tensor windows = batch(text, step);
    const Tensor logits = model->forward(windows.slice(1, 0, kSeqLen));
    const Tensor targets = windows.slice(1, 1).reshape({-1});
    const Tensor loss = torch::cross_entropy_loss(logits.flatten(0, 1), targets);
    const Tensor balance_loss = fmoe::total_loss(*model);
    (loss + kBalanceWeight * balance_loss).backward();
    optimizer.step(step, learning_rate(step, steps));
    char line[100];
    std::snprintf(line, sizeof line, "%ld,%.9g,%.9g\n", static_cast<long>(step), loss.item<float>(),
                  balance_loss.item<float>());
    curve << line << std::flush;
    if (step % 10 == 0 || step == steps)
      std::printf("step %ld of %ld: loss %.4f\n", static_cast<long>(step), static_cast<long>(steps),
                  loss.item<float>());
    std::fflush(stdout);
    if (step % kSaveEvery == 0 || step == steps) save(folder_of(out, step), *model, optimizer);
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "train TEXT OUT [STEPS]\n");
    return 2;
  }
  try {
    train(argv[1], argv[2], argc > 3 ? std::stoll(argv[3]) : 200);
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "train: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train: %s\n", error.what());
    return 1;
  }
  return 0;
}
