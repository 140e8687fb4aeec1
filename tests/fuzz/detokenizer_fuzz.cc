// F4: each byte is a token (its byte, or a control token). Joined deltas are the whole decode, and
// each delta is valid UTF-8.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>

#include "engine/tokenizer/incremental_detokenizer.h"
#include "engine/tokenizer/unicode.h"
#include "tests/engine/tokenizer/tiny_tokenizer.h"

namespace {

void CheckUtf8(std::string_view text) {
  for (size_t pos = 0; pos < text.size();) {
    const flashquant::DecodedChar c = flashquant::DecodeUtf8(text, pos);
    if (!c.valid) std::abort();
    pos += c.num_bytes;
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  static const std::unique_ptr<flashquant::Tokenizer> tokenizer = flashquant::TinyTokenizer();
  const int32_t control = *tokenizer->TokenId("<|im_end|>");
  flashquant::IncrementalDetokenizer detokenizer(tokenizer.get());
  std::string bytes;
  std::string joined;
  for (size_t i = 0; i < num_bytes; ++i) {
    const bool is_control = data[i] == 0x01;
    const std::string delta = detokenizer.Append(is_control ? control : data[i]);
    CheckUtf8(delta);
    joined += delta;
    if (!is_control) bytes.push_back(static_cast<char>(data[i]));
  }
  joined += detokenizer.Flush();
  CheckUtf8(joined);
  std::string whole;
  flashquant::Utf8Repair repair;
  repair.Append(bytes, &whole);
  repair.Flush(&whole);
  if (joined != whole) std::abort();
  return 0;
}
