// Bytes as a tokenizer.model. Accepted means usable: encoding stays below the vocabulary size.
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "engine/tokenizer/tokenizer_loader.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t num_bytes) {
  using flashquant::SpecialText;
  flashquant::TokenizerFiles files;
  files.tokenizer_model = std::string(reinterpret_cast<const char*>(data), num_bytes);
  const auto tokenizer = flashquant::MakeTokenizer(files);
  if (!tokenizer.ok()) return 0;
  for (const std::string_view text :
       {"abc \xC3\xA9 \xF0\x9F\x98\x80", "", "<s> aab", "\xFF", "  "}) {
    for (const SpecialText special : {SpecialText::kPlain, SpecialText::kRecognised}) {
      for (const int32_t id : (*tokenizer)->Encode(text, special)) {
        if (id < 0 || id >= (*tokenizer)->vocab_size()) std::abort();
        (void)(*tokenizer)->TokenBytes(id);
      }
    }
  }
  return 0;
}
