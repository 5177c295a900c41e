// The language model of examples/lm/model.py: a Transformer on bytes whose MLPs are mixtures of experts.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <fmoe/fmoe.h>

using torch::Tensor;

constexpr int64_t kVocabulary = 256, kWidth = 64, kLayers = 3, kHeads = 4, kExperts = 16, kHidden = 64;

struct RMSNorm : torch::nn::Module {
  RMSNorm() { weight = register_parameter("weight", torch::ones({kWidth})); }
  Tensor forward(const Tensor& x) { return torch::rms_norm(x, {kWidth}, weight); }
  Tensor weight;
};

inline torch::nn::Linear linear(int64_t in, int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

// Rotary position embedding of x [B, heads, S, d_head].
inline Tensor rotate(const Tensor& x) {
  const int64_t seq = x.size(2), d_head = x.size(3);
  const Tensor frequency = torch::pow(10000.0, -(torch::arange(0, d_head, 2) / d_head));
  const Tensor angle = torch::arange(seq).unsqueeze(1) * frequency;
  const Tensor cos = angle.cos(), sin = angle.sin();
  const auto parts = x.chunk(2, -1);
  return torch::cat({parts[0] * cos - parts[1] * sin, parts[1] * cos + parts[0] * sin}, -1);
}

struct Attention : torch::nn::Module {
  Attention() {
    qkv = register_module("qkv", linear(kWidth, 3 * kWidth));
    out = register_module("out", linear(kWidth, kWidth));
  }
  Tensor forward(const Tensor& x) {
    const int64_t batch = x.size(0), seq = x.size(1);
    const auto parts = qkv(x).view({batch, seq, 3, kHeads, kWidth / kHeads}).transpose(1, 3).unbind(2);
    const Tensor q = rotate(parts[0]), k = rotate(parts[1]);
    const Tensor y = torch::scaled_dot_product_attention(q, k, parts[2], {}, 0.0, /*is_causal=*/true);
    return out(y.transpose(1, 2).reshape({batch, seq, kWidth}));
  }
  torch::nn::Linear qkv{nullptr}, out{nullptr};
};

inline fmoe::MlpOptions mlp_options() {
  fmoe::MlpOptions o;
  o.num_expert = kExperts;
  o.d_model = kWidth;
  o.d_hidden = kHidden;
  o.activation = "swiglu";
  o.bias = false;
  o.gate = fmoe::make_gate<fmoe::SoftmaxGate>();
  return o;
}

struct Block : torch::nn::Module {
  Block() {
    attention_norm = register_module("attention_norm", std::make_shared<RMSNorm>());
    attention = register_module("attention", std::make_shared<Attention>());
    mlp_norm = register_module("mlp_norm", std::make_shared<RMSNorm>());
    mlp = register_module("mlp", std::make_shared<fmoe::FMoETransformerMLP>(mlp_options()));
  }
  Tensor forward(Tensor x) {
    x = x + attention->forward(attention_norm->forward(x));
    return x + mlp->forward(mlp_norm->forward(x));
  }
  std::shared_ptr<RMSNorm> attention_norm, mlp_norm;
  std::shared_ptr<Attention> attention;
  std::shared_ptr<fmoe::FMoETransformerMLP> mlp;
};

struct LanguageModel : torch::nn::Module {
  LanguageModel() {
    embedding = register_module("embedding", torch::nn::Embedding(kVocabulary, kWidth));
    const auto list = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < kLayers; ++i) {
      blocks.push_back(std::make_shared<Block>());
      list->push_back(blocks.back());
    }
    norm = register_module("norm", std::make_shared<RMSNorm>());
    head = register_module("head", linear(kWidth, kVocabulary));
    init_weights();
  }

  // Normal(0, 1 / sqrt(fan in)), zero into the residual stream; the embedding Normal(0, 0.5).
  void init_weights() {
    torch::NoGradGuard no_grad;
    const auto ends_with = [](const std::string& name, const std::string& end) {
      return name.size() >= end.size() && name.compare(name.size() - end.size(), end.size(), end) == 0;
    };
    for (auto& entry : named_parameters()) {
      Tensor& p = entry.value();
      if (ends_with(entry.key(), "attention.out.weight") || ends_with(entry.key(), "experts.h4toh.weight"))
        p.zero_();
      else if (p.dim() >= 2)
        p.normal_(0,
                  entry.key() == "embedding.weight" ? 0.5 : std::pow(static_cast<double>(p.size(-1)), -0.5));
    }
  }

  // Logits [B, S, 256] of the byte that follows each of tokens [B, S].
  Tensor forward(const Tensor& tokens) {
    Tensor x = embedding(tokens);
    for (const auto& block : blocks) x = block->forward(x);
    return head(norm->forward(x));
  }

  torch::nn::Embedding embedding{nullptr};
  std::vector<std::shared_ptr<Block>> blocks;
  std::shared_ptr<RMSNorm> norm;
  torch::nn::Linear head{nullptr};
};
