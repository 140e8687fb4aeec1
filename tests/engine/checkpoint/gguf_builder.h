// Builds GGUF files byte by byte for tests, good ones and, by raw values, bad ones. Shares no code
// with the importer.
#pragma once

#include <bit>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tests/engine/checkpoint/test_files.h"

namespace flashquant {

class GgufBuilder {
 public:
  // A string in the file: length, bytes.
  static std::string Text(std::string_view text) {
    return LittleEndian(text.size(), 8) + std::string(text);
  }

  // A key with a value of any type, given as bytes.
  GgufBuilder& AddRaw(std::string_view key, uint32_t type, std::string_view value) {
    keys_ += Text(key) + LittleEndian(type, 4) + std::string(value);
    ++num_keys;
    return *this;
  }
  GgufBuilder& AddInt(std::string_view key, uint32_t value) {
    return AddRaw(key, 4, LittleEndian(value, 4));
  }
  GgufBuilder& AddFloat(std::string_view key, float value) {
    return AddRaw(key, 6, LittleEndian(std::bit_cast<uint32_t>(value), 4));
  }
  GgufBuilder& AddBool(std::string_view key, bool value) {
    return AddRaw(key, 7, LittleEndian(value ? 1 : 0, 1));
  }
  GgufBuilder& AddString(std::string_view key, std::string_view value) {
    return AddRaw(key, 8, Text(value));
  }
  GgufBuilder& AddStrings(std::string_view key, const std::vector<std::string>& values) {
    std::string bytes = LittleEndian(8, 4) + LittleEndian(values.size(), 8);
    for (const std::string& value : values) bytes += Text(value);
    return AddRaw(key, 9, bytes);
  }
  GgufBuilder& AddInts(std::string_view key, const std::vector<int32_t>& values) {
    std::string bytes = LittleEndian(5, 4) + LittleEndian(values.size(), 8);
    for (const int32_t value : values) bytes += LittleEndian(static_cast<uint32_t>(value), 4);
    return AddRaw(key, 9, bytes);
  }
  GgufBuilder& AddFloats(std::string_view key, const std::vector<float>& values) {
    std::string bytes = LittleEndian(6, 4) + LittleEndian(values.size(), 8);
    for (const float value : values) bytes += LittleEndian(std::bit_cast<uint32_t>(value), 4);
    return AddRaw(key, 9, bytes);
  }

  // `dims` in GGUF's order, fastest first. The offset is the next one.
  GgufBuilder& AddTensor(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type,
                         std::string_view data) {
    AddTensorAt(name, dims, type, data_.size());
    data_ += data;
    data_.append((alignment - data_.size() % alignment) % alignment, '\0');
    return *this;
  }
  // The directory entry alone.
  GgufBuilder& AddTensorAt(std::string_view name, const std::vector<uint64_t>& dims, uint32_t type,
                           uint64_t offset) {
    directory_ += Text(name) + LittleEndian(dims.size(), 4);
    for (const uint64_t dim : dims) directory_ += LittleEndian(dim, 8);
    directory_ += LittleEndian(type, 4) + LittleEndian(offset, 8);
    ++num_tensors;
    return *this;
  }
  GgufBuilder& AddF32(std::string_view name, const std::vector<uint64_t>& dims,
                      const std::vector<float>& values) {
    std::string data;
    for (const float value : values) data += LittleEndian(std::bit_cast<uint32_t>(value), 4);
    return AddTensor(name, dims, 0, data);
  }

  std::string Build() const {
    std::string file = magic + LittleEndian(version, 4) + LittleEndian(num_tensors, 8) +
                       LittleEndian(num_keys, 8) + keys_ + directory_;
    file.append((alignment - file.size() % alignment) % alignment, '\0');
    return file + data_;
  }
  // End of keys and directory in the built file.
  size_t header_bytes() const { return 24 + keys_.size() + directory_.size(); }

  std::string magic = "GGUF";
  uint32_t version = 3;
  uint64_t num_tensors = 0;
  uint64_t num_keys = 0;
  size_t alignment = 32;

 private:
  std::string keys_;
  std::string directory_;
  std::string data_;
};

// A Llama model of one layer: width 8, 2 heads of dimension 4, 1 KV head, 5 tokens, tied head.
// Element i of a matrix is i plus a number of its own.
inline GgufBuilder TinyLlamaGguf() {
  GgufBuilder gguf;
  gguf.AddString("general.architecture", "llama")
      .AddInt("llama.block_count", 1)
      .AddInt("llama.context_length", 64)
      .AddInt("llama.embedding_length", 8)
      .AddInt("llama.feed_forward_length", 16)
      .AddInt("llama.attention.head_count", 2)
      .AddInt("llama.attention.head_count_kv", 1)
      .AddFloat("llama.attention.layer_norm_rms_epsilon", 1e-5f)
      .AddFloat("llama.rope.freq_base", 10000.0f)
      .AddInt("tokenizer.ggml.bos_token_id", 1)
      .AddInt("tokenizer.ggml.eos_token_id", 2);
  float base = 0;
  const auto add = [&](const char* name, uint64_t columns, uint64_t rows) {
    std::vector<float> values(columns * rows);
    for (size_t i = 0; i < values.size(); ++i) values[i] = base + static_cast<float>(i);
    base += 1000;
    gguf.AddF32(name, {columns, rows}, values);
  };
  add("token_embd.weight", 8, 5);
  add("blk.0.attn_q.weight", 8, 8);
  add("blk.0.attn_k.weight", 8, 4);
  add("blk.0.attn_v.weight", 8, 4);
  add("blk.0.attn_output.weight", 8, 8);
  add("blk.0.ffn_gate.weight", 8, 16);
  add("blk.0.ffn_up.weight", 8, 16);
  add("blk.0.ffn_down.weight", 16, 8);
  for (const char* name :
       {"blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight"}) {
    gguf.AddF32(name, {8}, std::vector<float>(8, 1.0f));
  }
  return gguf;
}

}  // namespace flashquant
