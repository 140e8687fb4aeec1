// The tiny llama of tests/data with a byte-level tokenizer of its own, as a folder that commands
// can work on, and a text for it.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/engine/tokenizer/tiny_tokenizer.h"
#include "tests/support/test_data.h"

namespace flashquant {

// Byte 65 is token 65, so the text below has one token a byte.
inline void CopyTinyLlama(const std::string& path) {
  std::filesystem::copy(TestDataPath("tiny_models/llama"), path,
                        std::filesystem::copy_options::recursive);
  std::ofstream(path + "/tokenizer.json") << TinyTokenizerJson({{"t", "h"}}, {"<s>"}).dump();
}

inline std::string TinyText(size_t length) {
  std::string text;
  for (uint32_t state = 1; text.size() < length;) {
    state = state * 1664525u + 1013904223u;
    text += static_cast<char>('a' + (state >> 24) % 26);
    if (state >> 29 == 0) text += ' ';
  }
  return text.substr(0, length);
}

}  // namespace flashquant
