#include "tests/support/reference_ops.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace flashquant {
namespace {

void AddInt4Part(const LinearPart& part, ReferenceLinear& linear) {
  const Int4Weight& weight = *part.int4;
  const size_t first = linear.weight.size();
  for (int64_t n = 0; n < weight.n; ++n) {
    for (int64_t k = 0; k < weight.k; ++k) {
      const int64_t group = k / weight.group_size;
      const double scale =
          ToFloat(weight.scales[static_cast<size_t>(n * weight.groups_per_row() + group)]);
      const int32_t code = weight.Code(n, k);
      const int32_t zero = weight.ZeroPoint(n, group);
      linear.weight.push_back(scale * (code - zero));
      linear.magnitude.push_back(std::fabs(scale) * (code + zero));
    }
  }
  if (part.outliers == nullptr) return;
  part.outliers->ForEachSlot([&](int64_t k, int64_t n, uint16_t bits) {
    const double value = ToFloat(BFloat16{bits});
    linear.weight[first + static_cast<size_t>(n * weight.k + k)] += value;
    linear.magnitude[first + static_cast<size_t>(n * weight.k + k)] += std::fabs(value);
  });
}

double DenseValue(const LinearPart& part, int64_t index) {
  switch (part.dense.dtype) {
    case DType::kBF16:
      return ToFloat(part.dense.As<BFloat16>()[index]);
    case DType::kF16:
      return ToFloat(part.dense.As<Half>()[index]);
    case DType::kI8:
      return ToFloat(part.row_scales[index / part.k()]) *
             static_cast<double>(part.dense.As<int8_t>()[index]);
    default:
      return part.dense.As<float>()[index];
  }
}

}  // namespace

ReferenceLinear MakeReferenceLinear(std::span<const LinearPart> parts) {
  ReferenceLinear linear;
  linear.k = parts[0].k();
  for (const LinearPart& part : parts) {
    linear.n += part.n();
    if (part.int4 != nullptr) {
      AddInt4Part(part, linear);
    } else {
      for (int64_t i = 0; i < part.n() * part.k(); ++i) {
        linear.weight.push_back(DenseValue(part, i));
        linear.magnitude.push_back(std::fabs(linear.weight.back()));
      }
    }
    for (int64_t n = 0; n < part.n(); ++n) {
      linear.bias.push_back(part.bias == nullptr ? 0.0 : ToFloat(part.bias[n]));
    }
  }
  return linear;
}

ReferenceProduct MultiplyReference(const ReferenceLinear& linear, std::span<const float> x,
                                   int64_t num_rows) {
  ReferenceProduct product;
  for (int64_t m = 0; m < num_rows; ++m) {
    for (int64_t n = 0; n < linear.n; ++n) {
      double sum = linear.bias[static_cast<size_t>(n)];
      double magnitude = std::fabs(sum);
      for (int64_t k = 0; k < linear.k; ++k) {
        const double input = x[static_cast<size_t>(m * linear.k + k)];
        sum += input * linear.weight[static_cast<size_t>(n * linear.k + k)];
        magnitude += std::fabs(input) * linear.magnitude[static_cast<size_t>(n * linear.k + k)];
      }
      product.y.push_back(sum);
      product.magnitude.push_back(magnitude);
    }
  }
  return product;
}

std::vector<double> ReferenceRmsNorm(std::span<const float> x, std::vector<double>& residual,
                                     std::span<const float> weight, int64_t num_rows,
                                     double epsilon) {
  std::vector<double> source(x.begin(), x.end());
  if (!residual.empty()) {
    for (size_t i = 0; i < source.size(); ++i) source[i] = residual[i] += source[i];
  }
  const size_t hidden = source.size() / static_cast<size_t>(num_rows);
  for (size_t row = 0; row < static_cast<size_t>(num_rows); ++row) {
    double squares = 0.0;
    for (size_t i = 0; i < hidden; ++i) {
      squares += source[row * hidden + i] * source[row * hidden + i];
    }
    const double root = std::sqrt(squares / static_cast<double>(hidden) + epsilon);
    for (size_t i = 0; i < hidden; ++i) source[row * hidden + i] *= weight[i] / root;
  }
  return source;
}

void ReferenceRope(std::span<double> head, std::span<const double> cosines,
                   std::span<const double> sines) {
  const size_t half = head.size() / 2;
  const std::vector<double> before(head.begin(), head.end());
  for (size_t i = 0; i < half; ++i) {
    head[i] = before[i] * cosines[i] - before[i + half] * sines[i];
    head[i + half] = before[i + half] * cosines[i] + before[i] * sines[i];
  }
}

std::vector<double> ReferenceAttentionHead(std::span<const double> q, std::span<const double> keys,
                                           std::span<const double> values, double softmax_scale) {
  const size_t d = q.size();
  const size_t num_keys = keys.size() / d;
  std::vector<double> weights(num_keys);
  for (size_t key = 0; key < num_keys; ++key) {
    for (size_t i = 0; i < d; ++i) weights[key] += q[i] * keys[key * d + i];
    weights[key] *= softmax_scale;
  }
  const double max = *std::max_element(weights.begin(), weights.end());
  double sum = 0.0;
  for (double& weight : weights) sum += weight = std::exp(weight - max);
  std::vector<double> out(d);
  for (size_t key = 0; key < num_keys; ++key) {
    for (size_t i = 0; i < d; ++i) out[i] += weights[key] / sum * values[key * d + i];
  }
  return out;
}

std::vector<double> ReferenceSiluAndMul(std::span<const float> gate_up, int64_t num_rows) {
  const size_t intermediate = gate_up.size() / static_cast<size_t>(num_rows) / 2;
  std::vector<double> out;
  for (size_t row = 0; row < static_cast<size_t>(num_rows); ++row) {
    for (size_t i = 0; i < intermediate; ++i) {
      const double gate = gate_up[row * 2 * intermediate + i];
      const double up = gate_up[row * 2 * intermediate + intermediate + i];
      out.push_back(gate / (1.0 + std::exp(-gate)) * up);
    }
  }
  return out;
}

std::vector<double> ReferenceTokenProbabilities(std::span<const float> logits, const SampleRow& row,
                                                std::span<const int32_t> banned_ids) {
  return ReferenceTokenProbabilities(std::vector<double>(logits.begin(), logits.end()), row,
                                     banned_ids);
}

std::vector<double> ReferencePenalisedLogits(std::span<const float> logits, const SampleRow& row,
                                             const ReferenceHistory& history) {
  std::vector<double> result;
  for (size_t id = 0; id < logits.size(); ++id) {
    const auto token = static_cast<int32_t>(id);
    const auto in_prompt = std::ranges::count(history.prompt, token);
    const auto in_answer = std::ranges::count(history.answer, token);
    double logit = logits[id];
    if (in_prompt + in_answer > 0) {
      const double penalty = row.repetition_penalty;
      logit = logit > 0.0 ? logit / penalty : logit * penalty;
    }
    if (in_answer > 0) logit -= row.presence_penalty;
    logit -= static_cast<double>(in_answer) * row.frequency_penalty;
    for (const TokenBias& bias : history.biases) {
      if (bias.token_id == token) logit += bias.bias;
    }
    result.push_back(logit);
  }
  return result;
}

std::vector<double> ReferenceLogprobs(std::span<const float> logits) {
  const double max = *std::ranges::max_element(logits);
  double total = 0.0;
  for (const float logit : logits) total += std::exp(static_cast<double>(logit) - max);
  std::vector<double> logprobs;
  for (const float logit : logits) {
    logprobs.push_back(static_cast<double>(logit) - max - std::log(total));
  }
  return logprobs;
}

std::vector<double> ReferenceTokenProbabilities(const std::vector<double>& logits,
                                                const SampleRow& row,
                                                std::span<const int32_t> banned_ids) {
  std::vector<size_t> order(logits.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::erase_if(order, [&](size_t id) {
    return std::find(banned_ids.begin() + row.banned_begin, banned_ids.begin() + row.banned_end,
                     static_cast<int32_t>(id)) != banned_ids.begin() + row.banned_end;
  });
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  std::vector<double> probabilities(logits.size());
  if (row.temperature < kGreedyTemperature) {
    probabilities[order[0]] = 1.0;
    return probabilities;
  }
  if (row.top_k > 0 && static_cast<size_t>(row.top_k) < order.size()) {
    order.resize(static_cast<size_t>(row.top_k));
  }
  const auto weight = [&](size_t id) {
    return std::exp((logits[id] - logits[order[0]]) / row.temperature);
  };
  double total = 0.0;
  for (size_t id : order) total += weight(id);
  double sum = 0.0;
  size_t kept = 0;
  while (kept < order.size() && (kept == 0 || sum < row.top_p * total))
    sum += weight(order[kept++]);
  if (row.top_p < 1.0f) order.resize(kept);
  std::erase_if(order, [&](size_t id) { return weight(id) < row.min_p; });
  total = 0.0;
  for (size_t id : order) total += weight(id);
  for (size_t id : order) probabilities[id] = weight(id) / total;
  return probabilities;
}

}  // namespace flashquant
