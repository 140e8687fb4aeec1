// A GPTQ checkpoint folder made by hand after the published format, for the tests of its reader and
// of the import: shares no code with either.
//
// Layout of a layer: qweight I32 [K/8, N], code of input 8 i + j at bits 4 j; qzeros I32
// [groups, N/8], zero point of output 8 i + j at bits 4 j; scales F16 [groups, N]; g_idx I32 [K].
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/base/bfloat16.h"
#include "nlohmann/json.hpp"
#include "tests/engine/checkpoint/test_files.h"

namespace flashquant {

// One layer as numbers.
struct GptqNumbers {
  int64_t n = 0;
  int64_t k = 0;
  int64_t groups = 0;
  std::vector<int> codes;     // [n][k]
  std::vector<int> zeros;     // [n][groups]
  std::vector<float> scales;  // [n][groups], F16 numbers
  std::vector<int> group_of;  // [k]

  double Value(int64_t row, int64_t column) const {
    const size_t group = static_cast<size_t>(row * groups + group_of[static_cast<size_t>(column)]);
    return static_cast<double>(scales[group]) *
           (codes[static_cast<size_t>(row * k + column)] - zeros[group]);
  }
};

// Round to nearest with min-max scales; group of input i is group_of[i].
inline GptqNumbers QuantizePlainly(const std::vector<float>& weights, int64_t n, int64_t k,
                                   std::vector<int> group_of, bool symmetric) {
  GptqNumbers numbers;
  numbers.n = n;
  numbers.k = k;
  numbers.group_of = std::move(group_of);
  numbers.groups = 1 + *std::max_element(numbers.group_of.begin(), numbers.group_of.end());
  numbers.codes.resize(weights.size());
  const size_t count = static_cast<size_t>(n * numbers.groups);
  std::vector<float> low(count, 0.0f);
  std::vector<float> high(count, 0.0f);
  const auto group_at = [&](size_t i) {
    const int64_t row = static_cast<int64_t>(i) / k;
    return static_cast<size_t>(row * numbers.groups + numbers.group_of[i % static_cast<size_t>(k)]);
  };
  for (size_t i = 0; i < weights.size(); ++i) {
    low[group_at(i)] = std::min(low[group_at(i)], weights[i]);
    high[group_at(i)] = std::max(high[group_at(i)], weights[i]);
  }
  for (size_t g = 0; g < count; ++g) {
    const float range = symmetric ? 2 * std::max(-low[g], high[g]) : high[g] - low[g];
    const float scale = ToFloat(ToHalf(std::max(range, 1e-3f) / 15.0f));
    numbers.scales.push_back(scale);
    numbers.zeros.push_back(
        symmetric ? 8 : static_cast<int>(std::clamp(std::round(-low[g] / scale), 0.0f, 15.0f)));
  }
  for (size_t i = 0; i < weights.size(); ++i) {
    const size_t g = group_at(i);
    numbers.codes[i] = static_cast<int>(std::clamp(
        std::round(weights[i] / numbers.scales[g]) + static_cast<float>(numbers.zeros[g]), 0.0f,
        15.0f));
  }
  return numbers;
}

inline std::vector<int> ContiguousGroups(int64_t k, int64_t group_size) {
  std::vector<int> group_of;
  for (int64_t i = 0; i < k; ++i) group_of.push_back(static_cast<int>(i / group_size));
  return group_of;
}

class GptqFolder final {
 public:
  enum class Zeros { kLessOne, kLessOneFromWords, kAsTheyAre };

  // Of the file's config; tests change members.
  nlohmann::json quantization = {{"quant_method", "gptq"}, {"bits", 4},
                                 {"group_size", 128},      {"desc_act", false},
                                 {"sym", false},           {"checkpoint_format", "gptq"}};
  nlohmann::json config = {{"architectures", {"LlamaForCausalLM"}}};
  std::string quantization_file = "config.json";  // or quantize_config.json

  void AddTensor(const std::string& name, const std::string& dtype, std::vector<int64_t> shape,
                 std::string bytes) {
    tensors_[name] = {dtype, std::move(shape), std::move(bytes)};
  }
  void Remove(const std::string& name) { tensors_.erase(name); }
  std::string& Bytes(const std::string& name) { return tensors_.at(name).bytes; }

  void AddLayer(const std::string& name, const GptqNumbers& numbers, Zeros zeros) {
    std::string qweight;
    for (int64_t word = 0; word < numbers.k / 8; ++word) {
      for (int64_t row = 0; row < numbers.n; ++row) {
        uint32_t bits = 0;
        for (int64_t j = 0; j < 8; ++j) {
          const size_t at = static_cast<size_t>(row * numbers.k + 8 * word + j);
          bits |= static_cast<uint32_t>(numbers.codes[at]) << (4 * j);
        }
        qweight += LittleEndian(bits, 4);
      }
    }
    std::string qzeros;
    std::string scales;
    for (int64_t group = 0; group < numbers.groups; ++group) {
      for (int64_t word = 0; word < numbers.n / 8; ++word) {
        uint32_t bits = 0;
        for (int64_t j = 0; j < 8; ++j) {
          const size_t at = static_cast<size_t>((8 * word + j) * numbers.groups + group);
          uint32_t zero = static_cast<uint32_t>(numbers.zeros[at]);
          if (zeros == Zeros::kLessOne) zero = (zero - 1) & 15;
          bits |= zero << (4 * j);
        }
        if (zeros == Zeros::kLessOneFromWords) bits -= 0x11111111u;
        qzeros += LittleEndian(bits, 4);
      }
      for (int64_t row = 0; row < numbers.n; ++row) {
        const float scale = numbers.scales[static_cast<size_t>(row * numbers.groups + group)];
        scales += LittleEndian(ToHalf(scale).bits, 2);
      }
    }
    std::string g_idx;
    for (const int group : numbers.group_of) {
      g_idx += LittleEndian(static_cast<uint32_t>(group), 4);
    }
    AddTensor(name + ".qweight", "I32", {numbers.k / 8, numbers.n}, qweight);
    AddTensor(name + ".qzeros", "I32", {numbers.groups, numbers.n / 8}, qzeros);
    AddTensor(name + ".scales", "F16", {numbers.groups, numbers.n}, scales);
    AddTensor(name + ".g_idx", "I32", {numbers.k}, g_idx);
  }

  void WriteTo(const std::string& path) const {
    std::filesystem::create_directories(path);
    nlohmann::json all = config;
    if (quantization_file == "config.json") {
      all["quantization_config"] = quantization;
    } else {
      std::ofstream(path + "/" + quantization_file) << quantization.dump();
    }
    std::ofstream(path + "/config.json") << all.dump();
    nlohmann::json header;
    std::string data;
    for (const auto& [name, tensor] : tensors_) {
      header[name] = {{"dtype", tensor.dtype},
                      {"shape", tensor.shape},
                      {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
      data += tensor.bytes;
    }
    const std::string bytes = SafetensorsBytes(header.dump(), data);
    std::ofstream(path + "/model.safetensors", std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }

 private:
  struct Tensor {
    std::string dtype;
    std::vector<int64_t> shape;
    std::string bytes;
  };
  std::map<std::string, Tensor> tensors_;
};

}  // namespace flashquant
