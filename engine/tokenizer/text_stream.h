// TextStream: the text of one answer as it may be sent: output tokens in, valid UTF-8 out, with
// everything held back that the end of the answer may still cut off.
//
// It never decides that the answer is over: the engine does, and says so by FinishedEvent. It only
// makes sure that nothing was shown that the engine cuts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/request.h"
#include "engine/tokenizer/incremental_detokenizer.h"
#include "engine/tokenizer/stop_matcher.h"
#include "engine/tokenizer/tokenizer.h"

namespace flashquant {

// Per request; one thread at a time (the delivery thread).
class TextStream final {
 public:
  // `stop` as the engine got it. `end_tokens`: the model's end tokens, of use when they are not
  // special tokens. `tokenizer` must outlive it.
  TextStream(const Tokenizer* tokenizer, StopConditions stop, std::vector<int32_t> end_tokens = {});

  // Takes the next output token, in order, end and stop tokens too. Returns the text that is now
  // safe: held back are a code point's first bytes, bytes that may become a stop sequence, a stop
  // sequence found (unless include_stop) and all that follows it or a stop token.
  std::string Append(int32_t token_id);

  // The rest of the text: up to byte `text_bytes` of the answer, all of it for nullopt. An
  // incomplete code point at the end becomes one U+FFFD. Call once, last.
  std::string Finish(std::optional<int64_t> text_bytes);

 private:
  bool EndsAnswer(int32_t token_id) const;
  // Moves bytes [released, end) of the answer to the text.
  std::string ReleaseUpTo(int64_t end);

  const Tokenizer* tokenizer_;
  const StopConditions stop_;
  const std::vector<int32_t> end_tokens_;
  StopMatcher matcher_;
  Utf8Repair repair_;
  std::string held_;  // bytes of the answer from released_bytes_ on
  int64_t released_bytes_ = 0;
  int32_t num_tokens_ = 0;
  bool frozen_ = false;  // the answer has ended here by our own reading
};

}  // namespace flashquant
